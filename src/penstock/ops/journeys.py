"""The way of rows through a step: out to their experts and home."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.graph.task import Name, Phase, Task
from penstock.ops.base import Kind, spec_of
from penstock.ops.blocks import computes_experts

ROWS = ("rows", "d_rows")
"""Roles under which rows are read in the forward half, and their gradients in the backward half."""


def journeys(tasks: Iterable[Task]) -> Iterator[tuple[Task, ...]]:
    """Yield for every computation of experts the tasks that its rows pass in turn: legs of dispatch, experts,
    legs of combine; in the backward half, those of combine come first.

    Where experts read several pieces, or several tasks read theirs, each piece is in one journey or more.
    tasks: of one step; a task that is missing ends a journey.
    """
    by_name = {task.name: task for task in tasks}
    after: dict[Name, list[Task]] = {name: [] for name in by_name}
    before: dict[Name, list[Task]] = {}
    for name, task in by_name.items():
        read = (source for role in ROWS for source in task.inputs.get(role, ()))
        before[name] = [by_name[source] for source in read if source in by_name]
        for source in before[name]:
            after[source.name].append(task)
    for task in by_name.values():
        if computes_experts(task.op) and task.phase is not Phase.WEIGHT:
            there, home = list(_ways(task, before)), list(_ways(task, after))
            for number in range(max(len(there), len(home))):
                way = reversed(there[number % len(there)])
                yield (*way, task, *home[number % len(home)])


def _ways(task: Task, beyond: Mapping[Name, Sequence[Task]]) -> Iterator[tuple[Task, ...]]:
    """Yield every way from a task through the transfers next to it; an empty way where there is none."""
    near = beyond[task.name]
    legs = [leg for leg in near if spec_of(leg.op).kind in (Kind.COLLECTIVE, Kind.COPY)]
    if not legs:
        yield ()
    for leg in legs:
        for way in _ways(leg, beyond):
            yield (leg, *way)
