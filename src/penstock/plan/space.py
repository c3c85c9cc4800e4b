"""The choices that a search examines: decisions that differ in the fields that their schedules read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, Final

from penstock.config import ConfigError, Table
from penstock.decision import Decision, Field
from penstock.decision.record import ALL_REDUCE_PIECES, FIELDS, MOST_SLICES, all_reduce_sizes
from penstock.features.field import Effect
from penstock.plan.problem import Problem

USUAL_PIECES = 4


def usual_chunk_bytes(problem: Problem) -> int:
    """Return the chunk size that is good for most problems: USUAL_PIECES of the largest layer's gradients."""
    sizes = all_reduce_sizes(problem)
    return sizes[min(ALL_REDUCE_PIECES.index(USUAL_PIECES), len(sizes) - 1)]


def values(problem: Problem, choice: Decision, field: Field) -> Sequence[Any]:
    """Return a field's valid values, given the rest of `choice`: the default where nothing reads it."""
    if not choice.reads(field.name):
        return (field.default,)
    for name, value in problem.forced:
        if name == field.name:
            return (value,)
    tried = field.values(problem, choice)
    if field.name == "schedule":  # a schedule that does not read what is set would drop it
        names = [name for name, _ in problem.forced]
        return [name for name in tried if _reads_all(name, names) and not problem.refusal(name)]
    if field.name == "dispatch":
        return [way for way in tried if (choice.schedule, way) not in problem.impossible]
    if field.name == "chunks" and (backward := dict(problem.forced).get("backward_chunks")):
        return [n for n in tried if lcm(n, backward) <= MOST_SLICES] or tried[:1]
    return tried or (choice.value(field.name),)  # of forced chunks, backward ones may all be too many slices


def _reads_all(schedule: str, names: Iterable[str]) -> bool:
    return all(Decision(schedule=schedule).reads(name) for name in names)


def forced(problem: Problem, given: Mapping[str, Any]) -> Problem:
    """Return the problem in which every choice has these values, by the names of decisions.

    Raises:
        ConfigError: For a setting that no choice can have, which it names.
    """
    first = Decision(dispatch=problem.dispatches[0])
    able, name = list(values(problem, first, FIELDS["schedule"])), given.get("schedule")
    if name is not None and name not in able:
        refusal = problem.refusal(name)
        why = "is not a schedule for these ranks, which share attention or experts otherwise"
        why = f"cannot cut this step: {refusal}" if refusal else why
        raise ConfigError("schedule.name", name, why, f"Use one of {', '.join(able)}.")
    readers = [each for each in able if name in (None, each)]
    for key, value in given.items():
        left = [each for each in readers if _reads_all(each, [key])]
        if not left:
            of = f"schedule {readers[0]}" if len(readers) == 1 else "any schedule that reads the others"
            why = f"has no effect with {of}, so no plan could keep it"
            raise ConfigError(f"schedule.{key}", value, why, "Remove it, or name another schedule.")
        readers = left
    pieces, form = given.get("microbatches", 1), given.get("expert_form")
    if pieces > problem.batch:
        why = f"{problem.batch} samples of a rank cannot be cut into more pieces than samples"
        raise ConfigError("schedule.microbatches", pieces, why, f"Nearest valid: {problem.batch}.")
    choices = [Decision(schedule=each, dispatch=way) for each in readers for way in problem.dispatches]
    forms = [each for choice in choices for each in FIELDS["expert_form"].values(problem, choice)]
    if form is not None and form not in forms:
        why = "is not a way in which rows can reach their experts on these ranks"
        possible = ", ".join(dict.fromkeys(filter(None, forms))) or "none: leave it out"
        raise ConfigError("schedule.expert_form", form, why, f"Possible: {possible}.")
    return replace(problem, forced=Table(given))


def space(problem: Problem, affecting: Effect | None = None) -> Iterator[Decision]:
    """Return every combination of values, in a fixed order.

    Args:
        affecting: The effect of the fields that are varied; all others keep their defaults. None = any
            effect.
    """
    choices = iter([Decision(dispatch=problem.dispatches[0])])
    for field in FIELDS.values():
        if affecting is None or affecting in field.affects:
            choices = _spread(choices, field, problem)
    return choices


def _spread(choices: Iterator[Decision], field: Field, problem: Problem) -> Iterator[Decision]:
    for choice in choices:
        for value in values(problem, choice, field):
            yield choice.deciding(field.name, value)


def neighbours(problem: Problem, choice: Decision) -> Iterator[Decision]:
    """Yield the decisions that differ in one field, and in others where these must change to stay valid.

    How rows travel comes before cuts: it decides most, and short searches get no further.
    """
    for field in sorted(FIELDS.values(), key=lambda field: field.name in CUTS):
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
        open_ = field.name in CUTS and not problem.forced
        if not open_ and choice.value(field.name) not in values(problem, choice, field):
            choice = choice.deciding(field.name, values(problem, choice, field)[0])
    return choice


def in_effect(problem: Problem, choice: Decision) -> Decision:
    """Return `choice` without chunks where they change nothing, so that descriptions leave them out."""
    pieces = ("chunks", "backward_chunks")
    cut = any(list(values(problem, choice, FIELDS[name])) != [1] for name in pieces)
    return choice if cut else replace(choice, chunks=1, backward_chunks=1)
