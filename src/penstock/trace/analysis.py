"""Analyses records: how much communication was hidden, predicted against measured, what a step waited for,
and which ranks compute longer than the others."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Annotated, Final

from penstock.config import Checked, Within
from penstock.config.bounds import MOST_RANKS
from penstock.graph import Lane, Phase, Task
from penstock.mesh import Axes, Mesh
from penstock.ops import spec_of
from penstock.timing import TaskRecord
from penstock.writing import write_whole

Span = tuple[float, float]
RUNS = ("predicted", "measured")


@dataclass(frozen=True, kw_only=True)
class Occupation:
    """How the lanes of one rank were used in one step. Seconds.

    Attributes:
        exposed_s: The time in which some communication was running and nothing was computed.
    """

    iteration_s: float
    compute_s: float
    communication_s: float
    exposed_s: float


def occupation(records: Iterable[TaskRecord], silent: Collection[Axes] = ()) -> Occupation:
    """Return the occupation of one rank in one step from its records.

    Args:
        silent: The groups of one rank, in which nothing is sent; their tasks do not count as communication.
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

    Args:
        records: The records of one rank in one step.
        needs: The tasks that every task reads.
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


@dataclass(frozen=True, kw_only=True)
class Link:
    """One task of the critical path.

    Attributes:
        gap_s: The time for which its lane was idle before it although nothing was awaited.
        start_s: Its start; for a transfer, when the last of its ranks had begun it: earlier time was waiting
            for that rank.
    """

    task: Task
    rank: int
    start_s: float
    end_s: float
    gap_s: float


def critical_path(
    records: Iterable[TaskRecord], needs: Mapping[Task, Sequence[Task]], mesh: Mesh
) -> list[Link]:
    """Return the tasks that a step waited for, in the order of time; [] without records.

    A task waits for what it needs and for the task before it on its lane; of these the last to end counts. A
    task that meets other ranks waits for the last of them, except for one that began after the task's end,
    from which nothing was to come. The links and the gaps before them add up to the end of the last link,
    from 0 on, whatever the error of clocks.

    Args:
        records: The records of one step on all ranks, by one clock.
        needs: The tasks that every task reads.
    """
    record_at = {(record.rank, record.task): record for record in records}
    before = _before(record_at.values())
    chain: list[Link] = []
    at = max(record_at.values(), key=lambda record: record.end_s, default=None)
    end_s = 0.0 if at is None else at.end_s
    while at is not None:
        ranks = mesh.members(at.rank, at.task.axes) if at.task.axes else (at.rank,)
        met = [record_at[rank, at.task] for rank in ranks if (rank, at.task) in record_at]
        begun = [record for record in met if record.start_s <= at.end_s]
        last = max(begun, key=lambda record: record.start_s)
        awaited = [record_at[last.rank, need] for need in needs[at.task] if (last.rank, need) in record_at]
        if (ahead := before.get((last.rank, last.task))) is not None:
            awaited.append(ahead)
        previous = max(awaited, key=lambda record: record.end_s, default=None)
        free_s = 0.0 if previous is None else max(previous.end_s, 0.0)  # a time before 0 is a clock's error
        start_s = min(max(last.start_s, free_s), end_s)  # what overlaps, by a clock's error, counts once
        free_s = min(free_s, start_s)
        chain.append(
            Link(
                task=last.task,
                rank=last.rank,
                start_s=start_s,
                end_s=end_s,
                gap_s=start_s - free_s,
            )
        )
        at, end_s = previous, free_s
    return chain[::-1]


def _before(records: Iterable[TaskRecord]) -> dict[tuple[int, Task], TaskRecord]:
    """Return, for every task on every rank, the task before it on its lane."""
    before: dict[tuple[int, Task], TaskRecord] = {}
    latest: dict[tuple[int, str], TaskRecord] = {}
    for record in sorted(records, key=lambda record: (record.start_s, record.end_s)):
        if (ahead := latest.get((record.rank, record.lane))) is not None:
            before[record.rank, record.task] = ahead
        latest[record.rank, record.lane] = record
    return before


SLOW: Final = 1.5
"""A rank that takes less than this many times as long as the median rank is no straggler."""

Kind = tuple[str, Phase]
"""Op and phase of computation."""

Rank = Annotated[int, Within(0, MOST_RANKS, "ranks count up from 0")]
Factor = Annotated[float, Within(1, 1e9, "a straggler takes longer than others")]


@dataclass(frozen=True, kw_only=True)
class Straggler(Checked):
    """A rank that computes slowly.

    Attributes:
        factor: How many times as long as the median rank it takes.
    """

    rank: Rank
    factor: Factor

    @property
    def words(self) -> str:
        """The straggler in words, as part of a sentence."""
        return f"computation on rank {self.rank} takes {self.factor:.2f}x as long as on the median rank"


def typical_seconds(records: Iterable[TaskRecord]) -> dict[Kind, float]:
    """Return the median duration of every kind of computation that is the same on all ranks.

    What is cut into chunks, experts and copies of their rows, is left out: how many rows a rank gets depends
    on the routing.
    """
    kinds: dict[Kind, list[float]] = defaultdict(list)
    for record in records:
        if record.lane.computes and "c" not in spec_of(record.task.op).indices:
            kinds[record.task.op, record.task.phase].append(record.duration_s)
    return {kind: median(seconds) for kind, seconds in kinds.items()}


def stragglers(everyone: Sequence[Mapping[Kind, float]]) -> tuple[Straggler, ...]:
    """Return the ranks that compute slowly, in their order.

    Of an even number of ranks the faster of the middle two is the median: of two ranks the slower one can be
    named.

    Args:
        everyone: The `typical_seconds` of every rank under one plan.
    """
    totals = [sum(seconds.values()) for seconds in everyone]
    usual_s = median_low(totals)
    if usual_s <= 0:
        return ()
    factors = ((rank, total_s / usual_s) for rank, total_s in enumerate(totals))
    return tuple(Straggler(rank=rank, factor=factor) for rank, factor in factors if factor >= SLOW)
