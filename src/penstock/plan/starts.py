"""The start of a search: good plans that need no planner, for an answer after a few simulations."""

from __future__ import annotations

from penstock.decision import Decision
from penstock.plan.problem import Problem
from penstock.plan.published import fsmoe_choice, idle_only
from penstock.plan.space import settled, usual_chunk_bytes, valid
from penstock.schedule.flowmoe import FlowMoE
from penstock.schedule.moe_pipeline import MoEPipeline
from penstock.schedule.penstock import Penstock


def first_choices(problem: Problem) -> list[Decision]:
    """Return plain expert parallelism, and every idea on its own with few pieces: microbatches, chunks, gaps.

    The gaps are FSMoE's by its closed formulas, filled with what fits into them and no more.
    """
    dispatch, size = problem.dispatches[0], usual_chunk_bytes(problem)
    choices = [
        Decision(dispatch=dispatch),
        Decision(schedule=MoEPipeline.name, chunks=2, backward_chunks=2, dispatch=dispatch),
        Decision(schedule=FlowMoE.name, microbatches=2, all_reduce_chunk_bytes=size, dispatch=dispatch),
    ]
    for microbatches, chunks in ((2, 1), (1, 2)):
        choices.append(
            Decision(
                schedule=Penstock.name,
                microbatches=microbatches,
                chunks=chunks,
                backward_chunks=chunks,
                all_reduce_chunk_bytes=size,
                priority="critical_path",
                dispatch=dispatch,
            )
        )
    gaps = settled(problem, fsmoe_choice(problem, idle_only))
    return list(dict.fromkeys([*(valid(problem, choice) for choice in choices), gaps]))
