"""Finds the chain of tasks that determined the length of a measured step, from its last task backwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.graph import Task
from penstock.mesh import Mesh
from penstock.trace.records import TaskRecord


@dataclass(frozen=True, kw_only=True)
class Link:
    """One task of the chain. gap_s: how long its lane was idle before it although nothing was awaited.

    start_s: of a transfer, when the last of its ranks had begun it: earlier time was waiting for that rank.
    """

    task: Task
    rank: int
    start_s: float
    end_s: float
    gap_s: float


def critical_path(
    records: Iterable[TaskRecord], needs: Mapping[Task, Sequence[Task]], mesh: Mesh
) -> list[Link]:
    """Return the chain in the order of time; [] without records.

    records: of one step on all ranks, by one clock. A task waits for what it needs and for the task before it
    on its lane; of these the last to end counts. A task that meets other ranks waits for the last of them,
    except for one that began after the task's end, from which nothing was to come. The links and the gaps
    before them add up to the end of the last link, from 0 on, whatever the error of clocks.
    """
    known = {(record.rank, record.task): record for record in records}
    before = _before(known.values())
    chain: list[Link] = []
    at = max(known.values(), key=lambda record: record.end_s, default=None)
    end_s = 0.0 if at is None else at.end_s
    while at is not None:
        ranks = mesh.members(at.rank, at.task.axes) if at.task.axes else (at.rank,)
        met = [known[rank, at.task] for rank in ranks if (rank, at.task) in known]
        begun = [record for record in met if record.start_s <= at.end_s]
        last = max(begun, key=lambda record: record.start_s)
        awaited = [known[last.rank, need] for need in needs[at.task] if (last.rank, need) in known]
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
    found: dict[tuple[int, Task], TaskRecord] = {}
    latest: dict[tuple[int, str], TaskRecord] = {}
    for record in sorted(records, key=lambda record: (record.start_s, record.end_s)):
        if (ahead := latest.get((record.rank, record.lane))) is not None:
            found[record.rank, record.task] = ahead
        latest[record.rank, record.lane] = record
    return found
