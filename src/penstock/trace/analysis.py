"""Analyses records: how much communication was hidden, and predicted against measured, task by task."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.graph import Lane, Task
from penstock.mesh import Axes
from penstock.trace.records import TaskRecord
from penstock.writing import write_whole

Span = tuple[float, float]
RUNS = ("predicted", "measured")


@dataclass(frozen=True, kw_only=True)
class Occupation:
    """How the lanes of one rank were used in one step. Seconds.

    exposed_s: time in which some communication was running and nothing was computed.
    """

    iteration_s: float
    compute_s: float
    communication_s: float
    exposed_s: float


def occupation(records: Iterable[TaskRecord], silent: Collection[Axes] = ()) -> Occupation:
    """Return the occupation of one rank in one step from its records.

    silent: groups of one rank, in which nothing is sent; their tasks do not count as communication.
    """
    records = [record for record in records if record.task.axes not in silent]
    compute = _union((r.start_s, r.end_s) for r in records if r.lane.computes)
    network = _union((r.start_s, r.end_s) for r in records if r.lane.is_network)
    everything = _union([*compute, *network])
    start = min((r.start_s for r in records), default=0.0)
    end = max((r.end_s for r in records), default=0.0)
    return Occupation(
        iteration_s=end - start,
        compute_s=_length(compute),
        communication_s=_length(network),
        exposed_s=_length(everything) - _length(compute),
    )


def overhead_s(records: Iterable[TaskRecord], needs: Mapping[Task, Sequence[Task]], lane: Lane) -> float:
    """Return seconds that a rank's lane was idle although its next task was ready: the scheduler's own cost.

    A task could start when the task before it on the lane and everything that it needs had ended.
    """
    records = list(records)
    ends = {record.task: record.end_s for record in records}
    total, free_s = 0.0, None
    for record in sorted((r for r in records if r.lane is lane), key=lambda r: r.start_s):
        inputs = [ends[need] for need in needs[record.task] if need in ends]
        possible = [*inputs] if free_s is None else [*inputs, free_s]
        if possible:
            total += max(0.0, record.start_s - max(possible))
        free_s = record.end_s
    return total


@dataclass(frozen=True, kw_only=True)
class TaskDifference:
    """One row of predicted against measured: the same task in both runs."""

    predicted: TaskRecord
    measured: TaskRecord

    @property
    def task(self) -> Task:
        return self.measured.task

    @property
    def difference_s(self) -> float:
        """Measured duration minus predicted duration."""
        return self.measured.duration_s - self.predicted.duration_s


def compare(predicted: Sequence[TaskRecord], measured: Sequence[TaskRecord]) -> list[TaskDifference]:
    """Compare task by task, in measured order. Both runs must hold the same tasks of one rank and step."""
    by_task = {record.task: record for record in predicted}
    if unknown := {r.task for r in measured} ^ by_task.keys():
        raise ValueError(f"{min(map(str, unknown))} is in only one of the two runs")
    rows = sorted(measured, key=lambda record: record.start_s)
    return [TaskDifference(predicted=by_task[r.task], measured=r) for r in rows]


def write_comparison(path: Path, rows: Iterable[TaskDifference]) -> None:
    """Write a CSV table of `compare`, times in seconds from the start of the step."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["task", "lane", *(f"{run}_{end}_s" for run in RUNS for end in ("start", "end"))])
    for row in rows:
        times = (row.predicted.start_s, row.predicted.end_s, row.measured.start_s, row.measured.end_s)
        table.writerow([row.task, row.task.lane, *(f"{time:.6f}" for time in times)])
    write_whole(path, text.getvalue())


def _union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
