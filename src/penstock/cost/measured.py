"""Costs read off a measured run: the median duration of every kind of task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from penstock.graph import Phase, Task
from penstock.trace.records import TaskRecord

Kind = tuple[int, str, Phase]
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
        """Of computation the median over tasks and steps on the slowest rank, for which all others wait.

        A collective lasts on a rank as long as that rank waits for the last one to arrive; only the last
        one sees the transfer alone. So of a collective the shortest duration over ranks counts.
        """
        together: dict[tuple[int, Task], list[float]] = defaultdict(list)
        apart: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for record in records:
            task = record.task
            if not task.axes:
                kind = (task.layer, task.op, task.phase)
                apart[kind, record.rank].append(record.duration_s)
            else:
                together[record.step, task].append(record.duration_s)
        kinds: dict[Kind, list[float]] = defaultdict(list)
        for (_, task), seconds in together.items():
            kinds[task.layer, task.op, task.phase].append(min(seconds))
        found = {kind: median(seconds) for kind, seconds in kinds.items()}
        for (kind, _), seconds in apart.items():
            found[kind] = max(found.get(kind, 0.0), median(seconds))
        return MeasuredCost(found, fallback)
