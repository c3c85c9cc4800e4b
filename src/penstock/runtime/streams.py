"""Lanes of a GPU: every lane is a stream, tasks are issued from one thread, and waiting is done by events on
the device; the host's own tasks run on a separate thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.device import Event, Pending, Stream, gpu_of
from penstock.graph import Lane, Phase, Task
from penstock.runtime.executor import MOST_KEPT, Call, Execute, LaneError, Ran, Span, stop_others
from penstock.runtime.transport import Later
from penstock.timing import slot_order
from penstock.topology.faults import ACTIVITY, PeerLostError, is_transport_error

LAYERS_AHEAD = 2
"""The host issues no exchange of a microbatch while the device has those of so many layers before it.

What one stream has made and another has read is free for PyTorch when the device, not the host, is done with
it: a host that is further ahead would find none of the buffers of rows that it has freed, and take new ones
for every layer. While it waits, the device has more to do than a layer. Pieces of gradients have no such
buffers, and may all come at the end.
"""


class StreamLanes:
    """GPU lanes: one stream per communication lane, computation on the current stream.

    Tasks are issued from one thread in an order that is a function of the schedule alone, so NCCL sees the
    same order on all ranks. The host waits only for tasks of its own lane: those run on a thread, when the
    device has what they read, and tasks that read their results are issued when they have ended.
    """

    def __init__(self, device: torch.device, on_failure: Callable[[], None]) -> None:
        self._device, self._on_failure = device, on_failure
        self._kind = gpu_of(device)
        self._streams: dict[Lane, Stream] = {}
        self._orders: dict[int, tuple[Span, IssueOrder]] = {}
        self.issued_s: dict[Task, float] = {}
        self._issued: set[tuple[str, Phase]] = set()
        self._host = ThreadPoolExecutor(1, "penstock-host")

    def run(self, span: Span, execute: Execute, *, timed: bool = True) -> Callable[[], list[Ran]]:
        if id(span) not in self._orders:
            if len(self._orders) >= 4 * MOST_KEPT:
                self._orders.pop(next(iter(self._orders)))
            self._orders[id(span)] = span, issue_order_of(span)  # with the span, or another could get its id
        order, main = self._orders[id(span)][1], self._kind.current_stream(self._device)
        origin = self._now(main, timed)
        ends: dict[tuple[Lane, int], Event] = {}
        spans: list[tuple[Task, Event, Event]] = []
        hosted: list[Pending[Ran]] = []
        for stream in self._streams.values():
            stream.wait_event(origin)
        for lane, number, call in order.calls:
            self._wait(hosted[: dict(call.waits).get(Lane.HOST, 0)])
            needed = [ends[wanted] for wanted in call.waits if wanted[0] is not Lane.HOST]
            if not lane.computes and lane not in self._streams:
                self._streams[lane] = self._kind.new_stream(self._device, str(lane))
                self._streams[lane].wait_event(origin)
            if lane is Lane.HOST:
                work = partial(self._run_on_host, call, needed, execute)
                hosted.append(self._kind.submit(self._host, call.task, work))
                continue
            begun_s = time.perf_counter()
            stream = main if lane.computes else self._streams[lane]
            for event in needed:
                stream.wait_event(event)
            start = self._now(stream, timed) if timed else origin
            before = order.held_up.get((lane, number))
            self._issue(call, stream, execute, after=None if before is None else ends[before])
            if timed or (lane, number) in order.awaited:
                ends[lane, number] = end = self._now(stream, timed)
                spans.append((call.task, start, end))
                if lane.is_network:  # what comes may be so much that issuing it waits for this
                    ACTIVITY.issued(self._kind.asking(end, self._device))
            if timed:
                self.issued_s[call.task] = time.perf_counter() - begun_s
        for wanted in order.last:
            main.wait_event(ends[wanted])
        ACTIVITY.issued(self._kind.issued(self._device))
        self._wait(hosted)
        ran = [future.result() for future in hosted]
        if ACTIVITY.lost is not None:
            failure = LaneError(order.calls[-1][2].task, 0.0)
            stop_others(self._on_failure, failure)
            raise failure from PeerLostError(ACTIVITY.lost)

        def times() -> list[Ran]:
            # It waits for the device, so it is for traces and metrics only. The device runs behind the host
            # by any time, so the clocks are compared where nothing is left to do.
            self._kind.synchronize(self._device)
            anchor = self._now(self._kind.current_stream(self._device), timed=True)
            anchor.synchronize()
            origin_s = time.perf_counter() - origin.elapsed_time(anchor) / 1e3
            own = (
                Ran(task, *(origin_s + origin.elapsed_time(event) / 1e3 for event in events))
                for task, *events in spans
            )
            return [*own, *ran]

        return times if timed else list

    def close(self) -> None:
        self._streams.clear()
        self._host.shutdown()

    def _run_on_host(self, call: Call, needed: Sequence[Event], execute: Execute) -> Ran:
        """Run a task of the host when the device has done what it needs. Raises LaneError.

        It has a stream of its own: its copies wait for nothing else.
        """
        with self._kind.running(call.task, self._streams[Lane.HOST]):
            start_s = time.perf_counter()
            try:
                for event in needed:
                    event.synchronize()
                start_s = time.perf_counter()
                ACTIVITY.check()
                execute(call)
            except BaseException as error:
                raise LaneError(call.task, time.perf_counter() - start_s) from _ended_by_others(error)
            return Ran(call.task, start_s, time.perf_counter())

    def _wait(self, hosted: Sequence[Pending[Ran]]) -> None:
        """Wait until these host tasks have ended. Raises LaneError."""
        for future in hosted:
            try:
                future.result()
            except LaneError as failure:
                stop_others(self._on_failure, failure)
                raise

    def _now(self, stream: Stream, timed: bool) -> Event:
        return stream.record_event(self._kind.event(timed=timed))

    def _issue(self, call: Call, stream: Stream, execute: Execute, after: Event | None) -> None:
        """Give a task to the device. after: what it must have done, so that the host is not too far ahead."""
        start_s = time.perf_counter()
        try:
            # Where kernels are loaded when they are first launched, the host waits for the device before the
            # first task of a kind. Loading may wait until the device has nothing to do, and a collective that
            # has begun waits for ranks that may load, too. All issue in one order: all have issued the same.
            kind = call.task.op, call.task.phase
            if self._kind.loads_lazily and kind not in self._issued:
                with ACTIVITY.exchanging("device"):
                    self._kind.synchronize(self._device)
                self._issued.add(kind)
            # All issue in one order, so the rank that has issued least waits for what all have issued.
            if after is not None:
                with ACTIVITY.exchanging("device"):
                    after.synchronize()
            ACTIVITY.check()
            with self._kind.running(call.task, stream):
                for tensor in tensors_in(execute(call)):
                    if tensor.device.type == self._device.type:  # numbers of the host belong to no stream
                        self._kind.record_stream(tensor, stream)
        except BaseException as error:
            failure = LaneError(call.task, time.perf_counter() - start_s)
            stop_others(self._on_failure, failure)
            raise failure from _ended_by_others(error)


def _ended_by_others(error: BaseException) -> BaseException:
    """Return the error, or in its place that another rank no longer takes part: numbers are anything then."""
    if ACTIVITY.lost is None or not isinstance(error, Exception) or is_transport_error(error):
        return error
    lost = PeerLostError(ACTIVITY.lost)
    lost.__cause__ = error
    return lost


@dataclass(frozen=True)
class IssueOrder:
    """What one thread issues.

    Attributes:
        calls: The calls, with their lanes and their numbers there, from 1.
        awaited: The calls for whose end others, the caller, or the thread itself may wait.
        last: The last call of every lane beside the compute lane.
        held_up: By an exchange that would be too far ahead, the one that must have ended when it is issued.
    """

    calls: Sequence[tuple[Lane, int, Call]]
    awaited: frozenset[tuple[Lane, int]]
    last: Sequence[tuple[Lane, int]]
    held_up: Mapping[tuple[Lane, int], tuple[Lane, int]]


def issue_order_of(span: Span) -> IssueOrder:
    """Return how a span is issued, a function of the span alone."""
    done = dict.fromkeys(span, 0)
    calls = []
    for lane, call in in_issue_order(span):
        done[lane] += 1
        calls.append((lane, done[lane], call))
    last = [
        (lane, count) for lane, count in done.items() if count and not (lane.computes or lane is Lane.HOST)
    ]
    exchanges = [each for each in calls if each[0].is_network and each[2].task.microbatch is not None]
    most = LAYERS_AHEAD * max(Counter(call.task.layer for _, _, call in exchanges).values(), default=0)
    places = [(lane, number) for lane, number, _ in exchanges]
    held_up = dict(zip(places[most:], places, strict=False))
    awaited = frozenset(last).union(held_up.values(), *(call.waits for _, _, call in calls))
    return IssueOrder(calls, awaited, last, held_up)


def in_issue_order(span: Span) -> list[tuple[Lane, Call]]:
    """Return all calls in the order in which one thread issues them; a function of the span alone.

    A simulation takes the same order (`timing.slot_order`): that in which they start where every task takes
    one slot, as in the schedule's picture. What starts earlier is issued earlier: when the host waits for the
    counts of a microbatch, the device has the experts of the one before in its queues, and a combine is
    issued before the experts that it runs beside. Lane by lane, as far as each can, would issue both too
    late: the host would wait for counts with empty queues, and combines would stand behind all experts.
    """
    calls = [(lane, call) for lane, each in span.items() for call in each]
    firsts = dict(zip(span, accumulate(map(len, span.values()), initial=0), strict=False))
    links = [[firsts[other] + count - 1 for other, count in call.waits] for _, call in calls]
    orders = {lane: range(first, first + len(span[lane])) for lane, first in firsts.items()}
    order = slot_order(orders, links)
    assert len(order) == len(calls), "a checked schedule does not deadlock"
    return [calls[place] for place in order]


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor inside a handler's inputs: they must outlive the stream that reads them.

    What a type holds is worked out once: this runs for every task, on the thread that issues all of them.
    """
    tensors: list[Tensor] = []
    _gather(value, tensors)
    return tensors


Gathering = Callable[[Any, list[Tensor]], None]
"""Adds the tensors inside a value to a list."""

_GATHERING: dict[type, Gathering | None] = {}
"""By the type of a value; None where it holds no tensors."""


def _gather(value: Any, found: list[Tensor]) -> None:
    kind = type(value)
    try:
        gathering = _GATHERING[kind]
    except KeyError:
        gathering = _GATHERING[kind] = _gathering_of(kind)
    if gathering is not None:
        gathering(value, found)


def _gathering_of(kind: type) -> Gathering | None:
    """Return how the tensors inside values of a type are found."""
    by_kind: dict[type | tuple[type, ...], Gathering | None] = {
        Tensor: lambda value, found: found.append(value),
        Later: lambda value, found: _gather(value.holds, found),
        Task: None,  # behind edges that order tasks, and hand on nothing
        Mapping: lambda value, found: _gather_all(value.values(), found),
        (list, tuple): _gather_all,
    }
    for base, gathering in by_kind.items():
        if issubclass(kind, base):
            return gathering
    if not is_dataclass(kind):
        return None
    names = [field.name for field in fields(kind)]
    return lambda value, found: _gather_all([getattr(value, name) for name in names], found)


def _gather_all(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        _gather(value, found)
