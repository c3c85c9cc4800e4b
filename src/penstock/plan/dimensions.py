"""What can be chosen: one `Dimension` per decision. Whoever adds one registers it, and it is searched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Protocol

from penstock.plan.choice import Choice
from penstock.plan.problem import Problem
from penstock.schedule import SCHEDULES, FSMoE, Penstock
from penstock.schedule.dense_overlap import DenseOverlap
from penstock.schedule.flowmoe import FlowMoE
from penstock.schedule.lina import Lina
from penstock.schedule.moe_pipeline import MoEPipeline

MOST_MICROBATCHES = 8
CHUNKS = (1, 2, 3, 4, 6, 8)
MOST_SLICES = 24
"""Forward and backward chunks are made of so many slices at most (StepShape.slices)."""

ALL_REDUCE_PIECES = (1, 2, 4, 8, 16, 32)
USUAL_PIECES = 4
LEAST_ALL_REDUCE_BYTES = 1 << 16
CUTS_BATCH = (FlowMoE.name, Penstock.name)
CUTS_TOKENS = (MoEPipeline.name, DenseOverlap.name, Lina.name, FSMoE.name, Penstock.name)
CUTS_ALL_REDUCE = (Lina.name, FlowMoE.name, Penstock.name)
"""Schedules that read microbatches; chunks; bytes of an all-reduce chunk."""

RULES = ("critical_path", "all_to_all_first")
"""Priority rules that are quick; `search` is tried on the best few plans only."""


class Dimension(Protocol):
    """One decision. It sees what the dimensions registered before it have decided."""

    @property
    def name(self) -> str: ...

    def values(self, problem: Problem, choice: Choice) -> Sequence[Any]:
        """What can be chosen, given the rest of `choice`; at least one value, and equal ones everywhere."""
        ...

    def apply(self, choice: Choice, value: Any) -> Choice:
        """`choice` with this decision made."""
        ...


@dataclass(frozen=True)
class Field:
    """A dimension that is a field of Choice."""

    name: str
    options: Callable[[Problem, Choice], Sequence[Any]]

    def values(self, problem: Problem, choice: Choice) -> Sequence[Any]:
        return self.options(problem, choice)

    def apply(self, choice: Choice, value: Any) -> Choice:
        return replace(choice, **{self.name: value})


def _schedules(problem: Problem, choice: Choice) -> Sequence[str]:
    del problem, choice
    return tuple(SCHEDULES)


def _microbatches(problem: Problem, choice: Choice) -> Sequence[int]:
    if choice.schedule not in CUTS_BATCH:
        return (1,)
    batch = problem.workload.batch
    return [n for n in range(1, min(batch, MOST_MICROBATCHES) + 1) if batch % n == 0]


def _chunks(problem: Problem, choice: Choice) -> Sequence[int]:
    return CHUNKS if choice.schedule in CUTS_TOKENS and any(problem.shape.moe_layers) else (1,)


def _backward_chunks(problem: Problem, choice: Choice) -> Sequence[int]:
    return [n for n in _chunks(problem, choice) if lcm(choice.chunks, n) <= MOST_SLICES]


def _all_reduce_bytes(problem: Problem, choice: Choice) -> Sequence[int]:
    """The largest layer's gradients whole, in halves, quarters and so on."""
    if choice.schedule not in CUTS_ALL_REDUCE:
        return (Choice.all_reduce_chunk_bytes,)
    work = problem.workload
    whole = max(*work.all_reduce_bytes, *work.expert_all_reduce_bytes, LEAST_ALL_REDUCE_BYTES)
    least = max(LEAST_ALL_REDUCE_BYTES, problem.least_chunk_bytes)
    return [size for n in ALL_REDUCE_PIECES if (size := -(-whole // n)) >= least or n == 1]


def usual_chunk_bytes(problem: Problem) -> int:
    """The size that is good for most: USUAL_PIECES of the largest layer's gradients."""
    sizes = _all_reduce_bytes(problem, Choice(schedule=FlowMoE.name))
    return sizes[min(ALL_REDUCE_PIECES.index(USUAL_PIECES), len(sizes) - 1)]


def _dispatches(problem: Problem, choice: Choice) -> Sequence[str]:
    del choice
    return problem.dispatches


def _priorities(problem: Problem, choice: Choice) -> Sequence[str]:
    del problem
    return RULES if choice.schedule == Penstock.name else (Choice.priority,)


DIMENSIONS: dict[str, Dimension] = {}


def register(dimension: Dimension) -> None:
    """Let every search decide this, too, after what has been registered before it. Names are unique."""
    if dimension.name in DIMENSIONS:
        raise ValueError(f"a dimension {dimension.name!r} is registered already; give yours another name")
    DIMENSIONS[dimension.name] = dimension


def unregister(name: str) -> None:
    """Take a dimension out again."""
    del DIMENSIONS[name]


for _dimension in (
    Field("schedule", _schedules),
    Field("microbatches", _microbatches),
    Field("chunks", _chunks),
    Field("backward_chunks", _backward_chunks),
    Field("all_reduce_chunk_bytes", _all_reduce_bytes),
    Field("dispatch", _dispatches),
    Field("priority", _priorities),
):
    register(_dimension)


def space(problem: Problem) -> Iterator[Choice]:
    """Every combination that the dimensions allow, in a fixed order."""
    choices = iter([Choice(dispatch=problem.dispatches[0])])
    for dimension in DIMENSIONS.values():
        choices = _spread(choices, dimension, problem)
    return choices


def _spread(choices: Iterator[Choice], dimension: Dimension, problem: Problem) -> Iterator[Choice]:
    for choice in choices:
        for value in dimension.values(problem, choice):
            yield dimension.apply(choice, value)


def neighbours(problem: Problem, choice: Choice) -> Iterator[Choice]:
    """Choices that differ in one dimension, and where that forces others, in the nearest valid way."""
    for dimension in DIMENSIONS.values():
        for value in dimension.values(problem, choice):
            other = valid(problem, dimension.apply(choice, value))
            if other != choice:
                yield other


def valid(problem: Problem, choice: Choice) -> Choice:
    """`choice` with the first value of every dimension whose value the rest does not allow."""
    for dimension in DIMENSIONS.values():
        options = [dimension.apply(choice, value) for value in dimension.values(problem, choice)]
        if choice not in options:
            choice = options[0]
    return choice
