"""Finds in a log what may go wrong on a device that runs streams in any order that events allow.

*Happens before*: the first of two operations is known to have ended when the second begins if both are in
one stream, or if a chain of events leads from one to the other, through other streams or the host. Every
actor has a vector clock: for every actor the number of its operations that have ended before what comes next
(Lamport 1978, Mattern 1989). Two accesses to the same bytes of which one writes must be ordered.

*Memory*: the caching allocator of PyTorch gives freed memory to the next allocation in the same stream at
once, without waiting, since work of one stream runs in order. What other streams still read must be ordered
before that by an event, or the tensor must have been recorded on them (`record_stream`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import torch

from tests.support.recording.recorder import (
    Access,
    Actor,
    Allocate,
    Call,
    Entry,
    Free,
    Keep,
    Launch,
    Record,
    Span,
    Wait,
)

Kind = Literal["read too early", "write too early", "freed too early"]
LARGEST = 1 << 20
"""Number of elements up to which strided parts of a block are compared one by one."""


@dataclass(frozen=True, slots=True)
class Use:
    """One side of a hazard: an operation of a task on an actor."""

    task: str
    actor: str
    op: str
    writes: bool

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.task} ({self.op}) on {self.actor}"


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two uses of a tensor's memory that nothing orders.

    Attributes:
        kind: "read too early": before the write that fills it has ended; "write too early": while another use
            may still run; "freed too early": memory goes back to its stream while another stream may still
            use it.
        tensor: The memory.
        first: The earlier use.
        second: The later one.
    """

    kind: Kind
    tensor: str
    first: Use
    second: Use

    def __str__(self) -> str:
        return f"{self.kind}: {self.tensor}: {self.first}, then {self.second}, and nothing orders them"


def find_hazards(log: Sequence[Entry], without: Collection[int] = ()) -> list[Hazard]:
    """Return every kind of hazard in a log once, in the order in which they are met.

    Args:
        without: Places in the log of entries that are left out, to see whether they are needed: numbers are
            not changed by that, since what is recorded was computed one operation after the other.
    """
    analysis = _Analysis()
    for place, entry in enumerate(log):
        if place not in without:
            analysis.take(entry)
    return list(analysis.found)


class _Past(NamedTuple):
    """An access that later ones are compared with. time: of its actor's own clock when it had ended."""

    actor: Actor
    time: int
    span: Span
    writes: bool
    task: str
    op: str

    @property
    def use(self) -> Use:
        return Use(self.task, str(self.actor), self.op, self.writes)


Clock = dict[int, int]
"""By actor, how many of its operations have ended."""


@dataclass
class _Analysis:
    """State of all actors and blocks at one point of the log."""

    clocks: dict[int, Clock] = field(default_factory=lambda: defaultdict(dict))
    events: dict[int, Clock] = field(default_factory=dict)
    past: dict[int, list[_Past]] = field(default_factory=lambda: defaultdict(list))
    kept: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    found: dict[Hazard, None] = field(default_factory=dict)

    def take(self, entry: Entry) -> None:
        match entry:
            case Launch():
                self._begin(entry.actor, entry.thread)
                for access in entry.accesses:
                    self._access(access, entry.actor, entry.task, entry.op)
            case Allocate(block, thread):
                # The memory may be that of a block whose last use is in this stream, so it can be used from
                # here on in this stream, and elsewhere after this point of it.
                self._begin(block.stream, thread)
                made = Access(block, Span(0, 1 << 62), writes=True)
                self._access(made, block.stream, block.task, "allocation")
            case Free(block, task, thread):
                clock = {**self.clocks[block.stream.number]}
                _merge(clock, self.clocks[thread.number])
                kept, home = self.kept.pop(block.number, set()), block.stream.number
                for past in self.past.pop(block.number, ()):
                    if block.in_host or not past.actor.on_device or past.actor.number in (home, *kept):
                        continue  # copies themselves tell the allocator of pinned memory which streams use it
                    if clock.get(past.actor.number, 0) < past.time:
                        freed = Use(task, str(block.stream), "free", writes=True)
                        self.found.setdefault(Hazard("freed too early", str(block), past.use, freed))
            case Keep(block, stream, _):
                self.kept[block.number].add(stream.number)
            case Record(event, actor, thread):
                self.events[event] = {**self._joined(actor, thread)}
            case Wait(event, actor, thread):
                clock = self._joined(actor, thread)
                _merge(clock, self.events.get(event, {}))

    def _begin(self, actor: Actor, thread: Actor) -> Clock:
        """Count one more operation of an actor; it begins after all that its thread knows to have ended."""
        clock = self._joined(actor, thread)
        clock[actor.number] = clock.get(actor.number, 0) + 1
        return clock

    def _joined(self, actor: Actor, thread: Actor) -> Clock:
        clock = self.clocks[actor.number]
        if thread.number != actor.number:
            _merge(clock, self.clocks[thread.number])
        return clock

    def _access(self, access: Access, actor: Actor, task: str, op: str) -> None:
        clock, uses = self.clocks[actor.number], self.past[access.block.number]
        now = _Past(actor, clock.get(actor.number, 0), access.span, access.writes, task, op)
        left = []
        for past in uses:
            ordered = clock.get(past.actor.number, 0) >= past.time
            if not ordered and (access.writes or past.writes) and overlap(past.span, access.span):
                kind: Kind = "read too early" if past.writes and not access.writes else "write too early"
                self.found.setdefault(Hazard(kind, str(access.block), past.use, now.use))
            # Whatever comes after this access, if that is ordered after it, is ordered after that past one.
            covered = access.writes or (not past.writes and past.actor.number == actor.number)
            outer, inner = access.span, past.span
            contained = not outer.strides and outer.first <= inner.first and inner.end <= outer.end
            if not (ordered and covered and contained):
                left.append(past)
        left.append(now)
        self.past[access.block.number] = left


def _merge(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time


def overlap(one: Span, other: Span) -> bool:
    """Return whether two parts of a block share a byte."""
    if one.end <= other.first or other.end <= one.first:
        return False
    if not (one.strides or other.strides) or max(_elements(one), _elements(other)) > LARGEST:
        return True
    first = min(one.first, other.first)
    covered = np.zeros(max(one.end, other.end) - first, dtype=bool)
    covered[_bytes(one) - first] = True
    return bool(covered[_bytes(other) - first].any())


def _elements(span: Span) -> int:
    return int(np.prod(span.sizes)) if span.strides else span.end - span.first


def _bytes(span: Span) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if not span.strides:
        return np.arange(span.first, span.end)
    starts = np.array([span.first])
    for size, stride in zip(span.sizes, span.strides, strict=True):
        starts = (starts[:, None] + np.arange(size) * stride).reshape(-1)
    return (starts[:, None] + np.arange(span.element_bytes)).reshape(-1)


# ---- how far the host is ahead of the device: memory that is freed and cannot be used again yet -----------


def most_pending_bytes(log: Sequence[Entry], begun: int) -> int:
    """Bytes that were freed and cannot be given away, at most, after an entry of a log.

    PyTorch gives memory that several streams have used away when the device is done with it. Of a device that
    is as late as it can be, the host knows that where it has waited for it.
    """
    analysis, pending, most = _Analysis(), list[tuple[int, dict[int, int]]](), 0
    for place, entry in enumerate(log):
        if isinstance(entry, Free) and not entry.block.in_host:
            others = analysis.kept.get(entry.block.number, set()) - {entry.block.stream.number}
            size_bytes = prod(entry.block.shape) * getattr(torch, entry.block.dtype).itemsize
            pending.append((size_bytes, {other: analysis.clocks[other].get(other, 0) for other in others}))
        analysis.take(entry)
        if isinstance(entry, Wait) and not entry.actor.on_device:
            known = analysis.clocks[entry.actor.number]
            pending = [each for each in pending if any(known.get(o, 0) < end for o, end in each[1].items())]
        if place >= begun:
            most = max(most, sum(size_bytes for size_bytes, ends in pending if ends))
    return most


# ---- where collectives of ranks do not fit, so that they would wait for each other for ever ---------------
#
# Of one communicator, call number i of every rank is the same collective: its kind must be equal on all
# ranks, and what one rank sends to another must be what that one receives. Over all communicators there
# must be one order that fits every rank's: NCCL promises nothing for two that are issued in one order here
# and in the other order there, since the first kernel may occupy what the second needs.
#
# Messages between two ranks are calls of a communicator of these two, in this direction. Those that one
# task issues one after the other through one process group begin together: none waits for another.


Issued = tuple[str, Call]
"""A collective, and the task that issued it."""


@dataclass(frozen=True, slots=True)
class Disorder:
    """Collectives of several ranks that do not fit each other.

    Attributes:
        kind: "number": a rank has issued fewer of a communicator than others; "kind", "bytes": what is the
            same call by its place is another collective, or of another size; "deadlock": ranks issue calls of
            several communicators in orders that no common order has.
        communicator: Its name; the first of several.
        tasks: By rank, which issued them.
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
    names = sorted({call.communicator for calls in ranks for _, call in calls})
    found = [disorder for name in names if (disorder := _of_communicator(name, ranks)) is not None]
    if found:
        return found
    # Calls of every communicator agree. What is left is a cycle of calls that each come before the next on
    # some rank.
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
        chain = " then ".join(f"{name} (call {number})" for name, number in cycle)
        return [Disorder("deadlock", cycle[0][0], tuple(where), f"no order of all ranks has {chain}")]
    return []


def _of_communicator(name: str, ranks: Sequence[Sequence[Issued]]) -> Disorder | None:
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
            return Disorder("number", name, _tasks(here), f"rank {absent[0]} has no call number {number}")
        kinds = {(call.op, call.ranks) for _, call in here.values()}
        if len(kinds) > 1:
            return Disorder("kind", name, _tasks(here), " and ".join(sorted(op for op, _ in kinds)))
        for rank, (_, call) in here.items():
            for peer, sent_bytes in zip(call.ranks, call.sent_bytes, strict=True):
                came_bytes = here[peer][1].received_bytes[call.ranks.index(rank)]
                if sent_bytes != came_bytes:
                    detail = f"rank {rank} sends {sent_bytes} bytes, rank {peer} expects {came_bytes}"
                    both = {each: here[each] for each in (rank, peer)}
                    return Disorder("bytes", name, _tasks(both), detail)
    return None


def _tasks(here: Mapping[int, Issued]) -> tuple[tuple[int, str], ...]:
    return tuple((rank, task) for rank, (task, _) in sorted(here.items()))
