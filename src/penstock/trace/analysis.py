"""What records say: how much communication was hidden, and predicted against measured, task by task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.graph import Lane, Task
from penstock.trace.records import TaskRecord

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Occupation:
    """How the lanes of one rank were used in one step. Seconds.

    exposed_s: time in which some communication was under way and nothing was computed.
    overlap_efficiency: the busiest lane's time over the iteration: 1.0 means that lane never waited.
    """

    iteration_s: float
    compute_s: float
    communication_s: float
    exposed_s: float

    @property
    def overlap_efficiency(self) -> float:
        busiest = max(self.compute_s, self.communication_s)
        return busiest / self.iteration_s if self.iteration_s > 0 else 1.0


def occupation(records: Iterable[TaskRecord]) -> Occupation:
    """Occupation of one rank in one step from its records."""
    records = list(records)
    compute = _union((r.start_s, r.end_s) for r in records if r.lane is Lane.COMPUTE)
    network = _union((r.start_s, r.end_s) for r in records if r.lane in (Lane.INTRA, Lane.INTER))
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
    """Seconds that one rank's lane stood still although its next task was ready: the scheduler's own cost.

    A task could start when the task before it on the lane and everything it needs had ended.
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
    """One row of predicted against measured. Seconds, measured minus predicted."""

    task: Task
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s


def compare(predicted: Sequence[TaskRecord], measured: Sequence[TaskRecord]) -> list[TaskDifference]:
    """Durations side by side, in the order of the measured run. Both must hold the same tasks of one rank."""
    durations = {record.task: record.duration_s for record in predicted}
    if unknown := {r.task for r in measured} ^ durations.keys():
        raise ValueError(f"{min(map(str, unknown))} is in only one of the two runs")
    rows = sorted(measured, key=lambda record: record.start_s)
    return [TaskDifference(task=r.task, predicted_s=durations[r.task], measured_s=r.duration_s) for r in rows]


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
