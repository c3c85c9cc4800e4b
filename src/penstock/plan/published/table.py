"""The choice that each published system would run for a problem. None of them chooses a dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import lcm

from penstock.decision import MOST_SLICES, Decision
from penstock.graph import Phase
from penstock.plan.problem import Problem
from penstock.plan.published.degree import ROUNDING, Loaded, common_degree, total_s
from penstock.plan.published.durations import Durations
from penstock.plan.published.parm import parm_choice, shares_experts
from penstock.plan.published.partition import PartitionPlanner, adaptive, loaded_parts
from penstock.plan.space import settled
from penstock.timing import iteration_s, slowest

LINA_BYTES = 30 << 20
"""A fixed size of chunks, whatever the gaps are like."""

FLOWMOE_MICROBATCHES = 2
"""The number of microbatches in all published runs of FlowMoE."""

FLOWMOE_CUTS = (1, 2, 4, 8, 16)
"""Numbers of all-reduce chunks of a block's gradients: the grid over S_p."""

TUNED_LAYERS = 4
"""The number of a long model's lowest layers on which FlowMoE is tuned."""


def sequential_choice(problem: Problem) -> Decision:
    """Return plain expert parallelism, as DeepSpeed-MoE runs it."""
    return Decision(dispatch=problem.workload.dispatch)


def pipemoe_choice(problem: Problem) -> Decision:
    """Return MoE-only pipelining with the best degree that forward and backward share (PipeMoE)."""
    return _cut("moe_pipeline", problem)


def lina_choice(problem: Problem) -> Decision:
    """Return PipeMoE's choice with all-reduces in fixed chunks, whenever no all-to-all is ready (Lina)."""
    size = max(LINA_BYTES, problem.least_chunk_bytes)  # larger only where a step has a terabyte of gradients
    return replace(_cut("lina", problem), all_reduce_chunk_bytes=size)


def dense_overlap_choice(problem: Problem) -> Decision:
    """Return PipeMoE's choice with all-reduces under dense parts (FSMoE calls it Tutel-Improved)."""
    return _cut("dense_overlap", problem)


def fsmoe_choice(problem: Problem, partition: PartitionPlanner = adaptive) -> Decision:
    """Return separate degrees for forward and backward, with gradients partitioned into gaps.

    A step has one degree in each direction, so layers with different best degrees share the best common one.
    """
    durations = Durations(problem)
    if not durations.moe_layers:
        return sequential_choice(problem)
    backward = durations.backward()
    planned = partition(backward)
    forward = [(durations.part(layer, Phase.FORWARD), 0.0) for layer in durations.moe_layers]
    chunks, backward_chunks = apart(forward, loaded_parts(backward, planned), durations.degrees)
    return Decision(
        schedule="fsmoe",
        chunks=chunks,
        backward_chunks=backward_chunks,
        dispatch=problem.workload.dispatch,
        partition=planned,
    )


def flowmoe_choice(problem: Problem, microbatches: int | None = None) -> Decision:
    """Return the best choice by simulation of a grid over S_p and, unless R is given, R in {2, 4, ...}.

    R is a divisor of the batch; a batch of one sample is not cut at all. A model of many layers is tuned on
    the lowest of them.
    """
    long = problem.shape.num_layers > TUNED_LAYERS
    short = problem.only(tuple(range(TUNED_LAYERS))) if long else problem
    batch = problem.workload.batch
    powers = [r for r in (2, 4, 8, 16) if batch % r == 0] or [1]
    largest = max(*problem.gradients.replicated, *problem.gradients.partial) or 512
    least = max(512, problem.least_chunk_bytes)
    sizes = dict.fromkeys(max(least, -(-largest // cut)) for cut in FLOWMOE_CUTS)
    choices = [
        Decision(
            schedule="flowmoe",
            microbatches=pieces,
            all_reduce_chunk_bytes=size,
            dispatch=problem.workload.dispatch,
        )
        for pieces in (powers if microbatches is None else [microbatches])
        for size in sizes
    ]
    return min(choices, key=lambda choice: _slowest_s(short, choice))


def flowmoe_published_choice(problem: Problem) -> Decision:
    """Return R = 2, as in all published runs, and the best S_p."""
    return flowmoe_choice(problem, FLOWMOE_MICROBATCHES if problem.workload.batch % 2 == 0 else 1)


def _cut(schedule: str, problem: Problem) -> Decision:
    """Return a schedule of chunks in MoE layers with one degree for both directions, by the exact formula."""
    durations = Durations(problem)
    parts = [
        (durations.part(layer, phase), 0.0)
        for layer in durations.moe_layers
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    chunks = common_degree(parts, durations.degrees).chunks if parts else 1
    return Decision(
        schedule=schedule, chunks=chunks, backward_chunks=chunks, dispatch=problem.workload.dispatch
    )


def apart(forward: Loaded, backward: Loaded, degrees: tuple[int, ...]) -> tuple[int, int]:
    """Return the best pair of degrees, one for each direction.

    Two degrees with few common factors cut shared tensors into crumbs, which ScheduleConfig refuses, so such
    pairs do not count.
    """
    pairs = [pair for pair in product(degrees, degrees) if lcm(*pair) <= max(MOST_SLICES, *pair)]
    forward_s = {degree: total_s(forward, degree) for degree in degrees}
    backward_s = {degree: total_s(backward, degree) for degree in degrees}
    at_most_s = min(forward_s[f] + backward_s[b] for f, b in pairs) * (1 + ROUNDING)
    return next((f, b) for f, b in pairs if forward_s[f] + backward_s[b] <= at_most_s)


def _slowest_s(problem: Problem, choice: Decision) -> float:
    """Return the seconds of a step of ranks all as slow as the slowest, as quick to simulate as one rank."""
    plan = problem.plan(choice)
    cost = problem.cost(choice, plan.shape)
    return iteration_s(plan.schedule, plan.graph, lambda task: slowest(cost(task)))


Planner = Callable[[Problem], Decision]

PUBLISHED: dict[str, Planner] = {
    "sequential": sequential_choice,
    "pipemoe": pipemoe_choice,
    "lina": lina_choice,
    "dense_overlap": dense_overlap_choice,
    "fsmoe": fsmoe_choice,
    "flowmoe": flowmoe_choice,
}
"""Planners that know no sharing: every rank has attention and experts of its own. They choose as published:
see `planners` for choices with the settings of a problem."""


def planners(problem: Problem) -> dict[str, Planner]:
    """Return the published planners that apply to a problem; their choices keep its settings."""
    by_name = {**PUBLISHED, "parm": parm_choice} if shares_experts(problem) else PUBLISHED
    return {name: partial(_settled, planner) for name, planner in by_name.items()}


def _settled(planner: Planner, problem: Problem) -> Decision:
    return settled(problem, planner(problem))
