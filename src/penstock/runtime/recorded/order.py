"""Finds in the logs of all ranks where collectives do not fit each other, so that ranks would wait for ever.

Of one communicator, call number i of every rank is the same collective: its kind must be equal on all ranks,
and what one rank sends to another must be what that one receives. Over all communicators there must be one
order that fits every rank's: NCCL promises nothing for two that are issued in one order here and in the other
order there, since the first kernel may occupy what the second needs.

Messages between two ranks are calls of a communicator of these two, in this direction. Those that one task
issues one after the other through one process group begin together: none waits for another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from penstock.runtime.recorded.log import Call, Entry, Launch

Issued = tuple[str, Call]
"""A collective, and the task that issued it."""


@dataclass(frozen=True, slots=True)
class Disorder:
    """Collectives of several ranks that do not fit each other.

    kind: "number": a rank has issued fewer of a communicator than others; "kind", "bytes": what is the same
    call by its place is another collective, or of another size; "deadlock": ranks issue calls of several
    communicators in orders that no common order has. communicator: its name; the first of several. tasks: by
    rank, which issued them.
    """

    kind: Literal["number", "kind", "bytes", "deadlock"]
    communicator: str
    tasks: tuple[tuple[int, str], ...]
    detail: str

    def __str__(self) -> str:
        where = ", ".join(f"rank {rank}: {task}" for rank, task in self.tasks)
        return f"{self.kind}, communicator {self.communicator}: {self.detail} ({where})"


def calls_of(log: Sequence[Entry]) -> list[Issued]:
    """Return a rank's collectives in the order of issue."""
    return [(entry.task, entry.call) for entry in log if isinstance(entry, Launch) and entry.call is not None]


def find_disorder(ranks: Sequence[Sequence[Issued]]) -> list[Disorder]:
    """Return what does not fit in the calls of all ranks, by rank. [] = no rank waits for ever."""
    found = [
        disorder
        for name in sorted({call.communicator for calls in ranks for _, call in calls})
        for disorder in _of_communicator(name, ranks)
    ]
    return found or list(_deadlocks(ranks))


def _of_communicator(name: str, ranks: Sequence[Sequence[Issued]]) -> Iterator[Disorder]:
    by_rank = {
        rank: [issued for issued in calls if issued[1].communicator == name]
        for rank, calls in enumerate(ranks)
    }
    members = sorted({rank for calls in by_rank.values() for _, call in calls for rank in call.ranks})
    lists = {rank: by_rank[rank] for rank in members}
    for number in range(max(map(len, lists.values()))):
        here = {rank: calls[number] for rank, calls in lists.items() if number < len(calls)}
        if len(here) < len(members):
            absent = [rank for rank in members if rank not in here]
            yield Disorder("number", name, _tasks(here), f"rank {absent[0]} has no call number {number}")
            return
        disorder = _compared(name, here)
        if disorder is not None:
            yield disorder
            return


def _compared(name: str, here: Mapping[int, Issued]) -> Disorder | None:
    """Return what differs in one call of all members of a communicator."""
    kinds = {(call.op, call.ranks) for _, call in here.values()}
    if len(kinds) > 1:
        return Disorder("kind", name, _tasks(here), " and ".join(sorted(op for op, _ in kinds)))
    for rank, (_, call) in here.items():
        for place, peer in enumerate(call.ranks):
            came_bytes = here[peer][1].received_bytes[call.ranks.index(rank)]
            if call.sent_bytes[place] != came_bytes:
                detail = f"rank {rank} sends {call.sent_bytes[place]} bytes, rank {peer} expects {came_bytes}"
                return Disorder("bytes", name, _tasks({each: here[each] for each in (rank, peer)}), detail)
    return None


def _deadlocks(ranks: Sequence[Sequence[Issued]]) -> Iterator[Disorder]:
    """Yield one cycle among calls that each come before the next on some rank."""
    before: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    tasks: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for rank, calls in enumerate(ranks):
        numbers: dict[str, int] = defaultdict(int)
        last, here = list[tuple[str, int]](), list[tuple[str, int]]()
        exchange = None
        for task, call in calls:
            node = call.communicator, numbers[call.communicator]
            numbers[call.communicator] += 1
            tasks[node][rank] = task
            if not call.exchange or exchange != (task, call.exchange):
                last, here = here, []
            exchange = task, call.exchange
            here.append(node)
            before[node].update(last)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        cycle = error.args[1][:-1]
        where = sorted({(rank, task) for node in cycle for rank, task in tasks[node].items()})
        names = " then ".join(f"{name} (call {number})" for name, number in cycle)
        yield Disorder("deadlock", cycle[0][0], tuple(where), f"no order of all ranks has {names}")


def _tasks(here: Mapping[int, Issued]) -> tuple[tuple[int, str], ...]:
    return tuple((rank, task) for rank, (task, _) in sorted(here.items()))
