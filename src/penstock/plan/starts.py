"""Where a search begins: good plans that need no planner, so there is an answer after a few simulations."""

from __future__ import annotations

from penstock.plan.choice import Choice
from penstock.plan.dimensions import usual_chunk_bytes, valid
from penstock.plan.problem import Problem
from penstock.plan.published import fsmoe_choice
from penstock.schedule import Penstock
from penstock.schedule.flowmoe import FlowMoE
from penstock.schedule.moe_pipeline import MoEPipeline


def first_choices(problem: Problem) -> list[Choice]:
    """Plain expert parallelism, and every idea on its own with few pieces: microbatches, chunks, gaps.

    The gaps are FSMoE's by its closed formulas, with what fits into them and no more.
    """
    dispatch, size = problem.dispatches[0], usual_chunk_bytes(problem)
    choices = [
        Choice(dispatch=dispatch),
        Choice(schedule=MoEPipeline.name, chunks=2, backward_chunks=2, dispatch=dispatch),
        Choice(schedule=FlowMoE.name, microbatches=2, all_reduce_chunk_bytes=size, dispatch=dispatch),
    ]
    for microbatches, chunks in ((2, 1), (1, 2)):
        choices.append(
            Choice(
                schedule=Penstock.name,
                microbatches=microbatches,
                chunks=chunks,
                backward_chunks=chunks,
                all_reduce_chunk_bytes=size,
                priority="critical_path",
                dispatch=dispatch,
            )
        )
    return list(
        dict.fromkeys(
            [*(valid(problem, choice) for choice in choices), fsmoe_choice(problem, partition="fsmoe_idle")]
        )
    )
