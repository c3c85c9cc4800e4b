"""Costs read off a measured run: the median duration of every kind of task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from penstock.graph import Group, Op, Phase, Task
from penstock.trace.records import TaskRecord

Kind = tuple[int, Op, Phase]
"""Tasks of one layer, op and phase are alike: they differ in microbatch and chunk only."""


@dataclass(frozen=True)
class MeasuredCost:
    """Seconds per kind of task; a task of a kind that never ran costs what `fallback` says."""

    seconds: dict[Kind, float]
    fallback: Callable[[Task], float]

    def __call__(self, task: Task) -> float:
        kind = (task.layer, task.op, task.phase)
        return self.seconds[kind] if kind in self.seconds else self.fallback(task)

    @staticmethod
    def from_records(records: Iterable[TaskRecord], fallback: Callable[[Task], float]) -> MeasuredCost:
        """Medians over tasks, steps and ranks.

        A collective lasts on a rank as long as that rank waits for the last one to arrive; only the last
        one sees the transfer alone. So of a collective the shortest duration over ranks counts.
        """
        durations: dict[tuple[int, Task], list[float]] = defaultdict(list)
        for record in records:
            durations[record.step, record.task].append(record.duration_s)
        kinds: dict[Kind, list[float]] = defaultdict(list)
        for (_, task), seconds in durations.items():
            alone = task.spec.group is Group.ALONE
            kinds[task.layer, task.op, task.phase].append(median(seconds) if alone else min(seconds))
        return MeasuredCost({kind: median(seconds) for kind, seconds in kinds.items()}, fallback)
