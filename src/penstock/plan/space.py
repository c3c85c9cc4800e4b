"""The choices that a search examines: decisions that differ in the fields that their schedules read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from penstock.decision import Decision, Field
from penstock.decision.record import ALL_REDUCE_PIECES, FIELDS, all_reduce_sizes
from penstock.plan.problem import Problem

USUAL_PIECES = 4


def usual_chunk_bytes(problem: Problem) -> int:
    """Return the chunk size that is good for most problems: USUAL_PIECES of the largest layer's gradients."""
    sizes = all_reduce_sizes(problem)
    return sizes[min(ALL_REDUCE_PIECES.index(USUAL_PIECES), len(sizes) - 1)]


def values(problem: Problem, choice: Decision, field: Field) -> Sequence[Any]:
    """Return a field's valid values, given the rest of `choice`: the default where nothing reads it."""
    return field.values(problem, choice) if choice.reads(field.name) else (field.default,)


def space(problem: Problem) -> Iterator[Decision]:
    """Return every combination of values, in a fixed order."""
    choices = iter([Decision(dispatch=problem.dispatches[0])])
    for field in FIELDS.values():
        choices = _spread(choices, field, problem)
    return choices


def _spread(choices: Iterator[Decision], field: Field, problem: Problem) -> Iterator[Decision]:
    for choice in choices:
        for value in values(problem, choice, field):
            yield choice.deciding(field.name, value)


def neighbours(problem: Problem, choice: Decision) -> Iterator[Decision]:
    """Yield the decisions that differ in one field, and in others where these must change to stay valid."""
    for field in FIELDS.values():
        for value in values(problem, choice, field):
            other = valid(problem, choice.deciding(field.name, value))
            if other != choice:
                yield other


def valid(problem: Problem, choice: Decision) -> Decision:
    """Return `choice` with the first allowed value for every field whose value the rest does not allow."""
    for field in FIELDS.values():
        allowed = values(problem, choice, field)
        if choice.value(field.name) not in allowed:
            choice = choice.deciding(field.name, allowed[0])
    return choice


CUTS: Final = (
    "schedule",
    "microbatches",
    "chunks",
    "backward_chunks",
    "all_reduce_chunk_bytes",
    "priority",
)
"""The fields that a published planner decides, also with values that a search does not try."""


def settled(problem: Problem, choice: Decision) -> Decision:
    """Return a planner's choice with what the problem says of all that the planner does not decide.

    So what a setting demands, such as experts that move or another dispatch, holds in it.
    """
    for field in FIELDS.values():
        if field.name not in CUTS and choice.value(field.name) not in values(problem, choice, field):
            choice = choice.deciding(field.name, values(problem, choice, field)[0])
    return choice


def in_effect(problem: Problem, choice: Decision) -> Decision:
    """Return `choice` without chunks where they change nothing, so that descriptions leave them out."""
    pieces = ("chunks", "backward_chunks")
    cut = any(list(values(problem, choice, FIELDS[name])) != [1] for name in pieces)
    return choice if cut else replace(choice, chunks=1, backward_chunks=1)
