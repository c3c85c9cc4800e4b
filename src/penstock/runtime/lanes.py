"""Lanes, on which tasks really run. The only file that starts threads and uses streams and events.

On a CPU every communication lane is a thread and the compute lane is the caller's thread. On a GPU every lane
is a stream, tasks are issued from one thread, and waiting is done by events on the device; the host's own
tasks run on a separate thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import accumulate
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, ClassVar, Final, Protocol
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from penstock.device import Event, Pending, Stream, device_of, gpu_of
from penstock.graph import Lane, Phase, Task
from penstock.runtime.calls import MOST_KEPT, Call, Span
from penstock.runtime.transport.legs import Later
from penstock.timing import slot_order
from penstock.topology.faults import ACTIVITY, HEARERS, PeerLostError, is_transport_error

END_S: Final = 1.0
"""How long a lane may still be in a transfer after a failure. What can be woken ends in milliseconds."""

Execute = Callable[[Call], Any]
"""Runs a call; returns what it read, whose memory must outlive the stream that reads it."""


@dataclass(frozen=True)
class Ran:
    """When a task ran, in seconds on the clock of `time.perf_counter`; on a GPU measured by its events."""

    task: Task
    start_s: float
    end_s: float


class LaneError(Exception):
    """A task raised an error. Carries the task, how long it ran, and the error as `__cause__`."""

    def __init__(self, task: Task, waited_s: float) -> None:
        super().__init__(str(task))
        self.task, self.waited_s = task, waited_s


class Lanes(Protocol):
    """Runs the calls of a span; each starts when the call before it and those that it waits for are done.

    issued_s: by task, how long a thread that hands out all tasks was busy with it when times were last asked
    for, waits for the device included; empty where every lane has a thread of its own.
    """

    issued_s: dict[Task, float]

    def run(self, span: Span, execute: Execute, *, timed: bool = True) -> Callable[[], list[Ran]]:
        """Run all calls, then return a function that gives their times. Raises LaneError.

        timed: whether times will be asked for; where they cost something there are none otherwise.
        """
        ...

    def close(self) -> None: ...


class ThreadLanes:
    """CPU lanes. `on_failure` must wake the threads that wait in a collective, as far as that can be done.

    Gloo wakes no thread whose message is partly on its way when the connection breaks: such a one waits for
    the timeout. Its lane is left alone after `END_S`, and gets another thread. So a step does not depend on
    it, neither on the rank that fails nor on one that hears of it.
    """

    _live: ClassVar[WeakSet[ThreadLanes]] = WeakSet()
    """Those of this process that meet other ranks."""

    def __init__(self, on_failure: Callable[[], None], *, alone: bool = False) -> None:
        self._on_failure = on_failure
        self._workers: dict[Lane, _Worker] = {}
        finalize(self, _leave_alone, self._workers).atexit = False
        self.issued_s: dict[Task, float] = {}
        self._run: _ThreadRun | None = None
        self._lost = ""
        if not alone:
            self._live.add(self)

    def run(self, span: Span, execute: Execute, *, timed: bool = True) -> Callable[[], list[Ran]]:
        del timed  # two looks at the clock cost less than to ask whether they are wanted
        self._run = run = _ThreadRun(span, execute, self._on_failure)
        try:
            if self._lost:  # after `_run` is set: news that come between the two are seen twice, not missed
                run.lose(self._lost)
            self._walk(run)
        finally:
            self._run = None
        if run.failure is not None:
            raise run.failure from run.failure.__cause__
        # What follows keeps not `run`, which refers to `execute`: a cycle would keep a step's tensors.
        times = {lane: progress.times for lane, progress in run.lanes.items()}
        return lambda: [
            Ran(call.task, start_s, end_s)
            for lane, calls in span.items()
            for call, (start_s, end_s) in zip(calls, times[lane], strict=True)
        ]

    @classmethod
    def hear(cls, told: str) -> None:
        """End the runs of this process that meet other ranks, those to come on the same connections too: a
        rank has given up."""
        for each in list(cls._live):
            each._lost = told
            run = each._run
            if run is not None:
                run.lose(told)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()

    def _walk(self, run: _ThreadRun) -> None:
        """Run all lanes to their ends; after a failure as far as they can be woken."""
        busy = [lane for lane, calls in run.span.items() if calls and not lane.computes]
        for lane in busy:
            if lane not in self._workers:
                self._workers[lane] = _Worker(lane)
            self._workers[lane].start(run.walk_to_end)
        try:
            run.walk(Lane.COMPUTE)
        except BaseException as error:  # an interrupt between two tasks
            run.interrupt(Lane.COMPUTE, error)
        for lane in run.settle(busy):
            self._workers.pop(lane).leave_alone()


HEARERS.append(ThreadLanes.hear)


def _leave_alone(workers: Mapping[Lane, _Worker]) -> None:
    """Let the threads of lanes that nobody holds any more end."""
    for worker in workers.values():
        worker.leave_alone()


class _Worker:
    """The thread of one communication lane; lives as long as its lanes."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._jobs: SimpleQueue[Callable[[Lane], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name=f"penstock-{lane}", daemon=True)
        self._thread.start()

    def start(self, job: Callable[[Lane], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self.leave_alone()
        self._thread.join()

    def leave_alone(self) -> None:
        """Let the thread end when its job does, whenever that is."""
        self._jobs.put(None)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job(self.lane)
            del job  # or it would keep the tensors of its step until the next


class _Progress:
    """How far one lane is, and what it waits for. Only its own thread writes `done` and `wanted`.

    A lane that waits names the lane and the count in `wanted`, then looks once more, then sleeps; a lane that
    ends a call counts it, then looks which lanes want it. One of the two sees the other, so no wake-up is
    lost.
    """

    __slots__ = ("done", "times", "wake", "wanted")

    def __init__(self) -> None:
        self.done = 0
        self.wanted: tuple[Lane, int] | None = None
        self.wake: SimpleQueue[None] = SimpleQueue()
        self.times: list[tuple[float, float]] = []


class _ThreadRun:
    """One span on thread lanes: how far each lane is, and the first failure."""

    def __init__(self, span: Span, execute: Execute, on_failure: Callable[[], None]) -> None:
        self.span, self._execute, self._on_failure = span, execute, on_failure
        self.lanes = {lane: _Progress() for lane in span}
        self._ended: SimpleQueue[Lane | None] = SimpleQueue()
        self._failing = Lock()
        self.failure: LaneError | None = None

    def walk(self, lane: Lane) -> None:
        """Run one lane's calls from front to back; stop early if any lane has failed."""
        if lane not in self.span:
            return
        mine = self.lanes[lane]
        others = [other for name, other in self.lanes.items() if name is not lane]
        execute, times, clock = self._execute, mine.times, time.perf_counter
        for call in self.span[lane]:
            try:
                if (call.waits and not self._wait(mine, call)) or self.failure is not None:
                    return
            except BaseException as error:  # an interrupt while waiting stops all lanes, too
                self._fail(call.task, 0.0, error)
                return
            start_s = clock()
            try:
                execute(call)
            except BaseException as error:
                self._fail(call.task, clock() - start_s, error)
                return
            times.append((start_s, clock()))
            mine.done += 1
            for other in others:
                wanted = other.wanted
                if wanted is not None and wanted[0] is lane and wanted[1] <= mine.done:
                    other.wake.put(None)

    def walk_to_end(self, lane: Lane) -> None:
        """Run one lane's calls, and say so when that is over."""
        try:
            self.walk(lane)
        finally:
            self._ended.put(lane)

    def settle(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Wait until these lanes have ended. Return those that a failure has not woken from a transfer.

        An interrupt that comes meanwhile stops all lanes first.
        """
        while lanes:
            # What runs on this host alone ends by itself, and works on what its caller goes on with.
            stuck = self.failure is not None and all(lane.is_network for lane in lanes)
            try:
                ended = self._ended.get(timeout=END_S if stuck else None)
            except Empty:
                break
            except BaseException as error:
                self.interrupt(lanes[0], error)
            else:
                lanes = [lane for lane in lanes if lane is not ended]
        return lanes

    def interrupt(self, lane: Lane, error: BaseException, waited_s: float = 0.0) -> None:
        """Stop all lanes because of an interruption from outside while `lane` was running."""
        lane = lane if self.span.get(lane) else next(each for each, calls in self.span.items() if calls)
        calls, done = self.span[lane], self.lanes[lane].done
        self._fail(calls[min(done, len(calls) - 1)].task, waited_s, error)

    def lose(self, told: str) -> None:
        """Stop all lanes as another rank no longer takes part; the first that may wait for it says so."""
        going = (
            lane for lane in self.span if lane.is_network and self.lanes[lane].done < len(self.span[lane])
        )
        self.interrupt(next(going, Lane.COMPUTE), PeerLostError(told), ACTIVITY.waited_s)

    def _wait(self, mine: _Progress, call: Call) -> bool:
        """Wait until other lanes are as far as the call needs. Returns False if a lane has failed."""
        for lane, count in call.waits:
            other = self.lanes[lane]
            if other.done >= count:
                continue
            mine.wanted = (lane, count)
            while other.done < count and self.failure is None:
                mine.wake.get()
            mine.wanted = None
            if self.failure is not None:
                return False
        return True

    def _fail(self, task: Task, waited_s: float, error: BaseException) -> None:
        with self._failing:
            first = self.failure is None
            if first:
                failure = LaneError(task, waited_s)
                failure.__cause__ = error
                self.failure = failure
        for lane in self.lanes.values():
            lane.wake.put(None)
        self._ended.put(None)
        if first and self.failure is not None:
            _stop_others(self._on_failure, self.failure)


def _stop_others(on_failure: Callable[[], None], failure: LaneError) -> None:
    try:
        on_failure()
    except Exception as error:  # the first failure is the one to report
        failure.add_note(f"while stopping the other lanes: {type(error).__name__}: {error}")


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
        order, main = self._order(span), self._kind.current_stream(self._device)
        origin = self._now(main, timed)
        ends: dict[tuple[Lane, int], Event] = {}
        spans: list[tuple[Task, Event, Event]] = []
        hosted: list[Pending[Ran]] = []
        for stream in self._streams.values():
            stream.wait_event(origin)
        for lane, number, call in order.calls:
            self._wait(hosted[: dict(call.waits).get(Lane.HOST, 0)])
            needed = [ends[wanted] for wanted in call.waits if wanted[0] is not Lane.HOST]
            if lane is Lane.HOST:
                work = partial(run_on_host, call, needed, execute)
                hosted.append(self._kind.submit(self._host, call.task, work))
                continue
            begun_s = time.perf_counter()
            stream = main if lane is Lane.COMPUTE else self._stream(lane, origin)
            for event in needed:
                stream.wait_event(event)
            start = self._now(stream, timed) if timed else origin
            self._issue(call, stream, execute)
            if timed or (lane, number) in order.awaited:
                ends[lane, number] = end = self._now(stream, timed)
                spans.append((call.task, start, end))
            if timed:
                self.issued_s[call.task] = time.perf_counter() - begun_s
        for wanted in order.last:
            main.wait_event(ends[wanted])
        ACTIVITY.issued(self._now(main, timed=False).query)
        self._wait(hosted)
        found = [future.result() for future in hosted]
        if ACTIVITY.lost is not None:
            failure = LaneError(order.calls[-1][2].task, 0.0)
            _stop_others(self._on_failure, failure)
            raise failure from PeerLostError(ACTIVITY.lost)
        return (lambda: [*self._elapsed(origin, spans), *found]) if timed else list

    def close(self) -> None:
        self._streams.clear()
        self._host.shutdown()

    def _wait(self, hosted: Sequence[Pending[Ran]]) -> None:
        """Wait until these host tasks have ended. Raises LaneError."""
        for future in hosted:
            try:
                future.result()
            except LaneError as failure:
                _stop_others(self._on_failure, failure)
                raise

    def _order(self, span: Span) -> IssueOrder:
        """Return the order of issue of a span, worked out once for as many spans as programs are kept."""
        if id(span) not in self._orders:
            if len(self._orders) >= 4 * MOST_KEPT:
                self._orders.pop(next(iter(self._orders)))
            self._orders[id(span)] = span, issue_order_of(span)  # with the span, or another could get its id
        return self._orders[id(span)][1]

    def _now(self, stream: Stream, timed: bool) -> Event:
        return stream.record_event(self._kind.event(timed=timed))

    def _stream(self, lane: Lane, origin: Event) -> Stream:
        if lane not in self._streams:
            self._streams[lane] = self._kind.new_stream(self._device, str(lane))
            self._streams[lane].wait_event(origin)
        return self._streams[lane]

    def _meet(self, task: Task) -> None:
        """Wait for the device before the first task of its kind, where kernels are loaded when they are first
        launched.

        Loading one may wait until the device has nothing to do, and a collective that has begun waits for
        ranks that may load one, too. All ranks issue in one order, so here all have issued the same ones.
        """
        kind = task.op, task.phase
        if self._kind.loads_lazily and kind not in self._issued:
            with ACTIVITY.exchanging("device"):
                self._kind.synchronize(self._device)
            self._issued.add(kind)

    def _issue(self, call: Call, stream: Stream, execute: Execute) -> None:
        start_s = time.perf_counter()
        try:
            self._meet(call.task)
            ACTIVITY.check()
            with self._kind.running(call.task, stream):
                for tensor in tensors_in(execute(call)):
                    if tensor.device.type == self._device.type:  # numbers of the host belong to no stream
                        self._kind.record_stream(tensor, stream)
        except BaseException as error:
            failure = LaneError(call.task, time.perf_counter() - start_s)
            _stop_others(self._on_failure, failure)
            raise failure from _ended_by_others(error)

    def _elapsed(self, origin: Event, spans: Sequence[tuple[Task, Event, Event]]) -> list[Ran]:
        """Return the times of a run. Waits for the device, so it is for traces and metrics only.

        The device runs behind the host by any time, so the clocks are compared where nothing is left to do.
        """
        self._kind.synchronize(self._device)
        anchor = self._now(self._kind.current_stream(self._device), timed=True)
        anchor.synchronize()
        origin_s = time.perf_counter() - origin.elapsed_time(anchor) / 1e3

        def since(event: Event) -> float:
            return origin_s + origin.elapsed_time(event) / 1e3

        return [Ran(task, since(start), since(end)) for task, start, end in spans]


def build_lanes(device: torch.device, on_failure: Callable[[], None], *, alone: bool = False) -> Lanes:
    """Return the lanes of a device. on_failure: wakes whoever waits in a collective. alone: no task meets
    another rank."""
    if device_of(device).is_gpu:
        return StreamLanes(device, on_failure)
    return ThreadLanes(on_failure, alone=alone)


class Happened(Protocol):
    """An occurrence on the device that can be waited for, such as an event."""

    def synchronize(self) -> None: ...


def run_on_host(call: Call, needed: Sequence[Happened], execute: Execute) -> Ran:
    """Run a task of the host when the device has done what the task needs. Raises LaneError."""
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


def _ended_by_others(error: BaseException) -> BaseException:
    """Return the error, or in its place that another rank no longer takes part: numbers are anything then."""
    if ACTIVITY.lost is None or not isinstance(error, Exception) or is_transport_error(error):
        return error
    found = PeerLostError(ACTIVITY.lost)
    found.__cause__ = error
    return found


@dataclass(frozen=True)
class IssueOrder:
    """What one thread issues. calls: with their numbers on their lanes, from 1. awaited: the calls whose end
    others, or the caller, wait for. last: of every lane beside the compute lane, the last call."""

    calls: Sequence[tuple[Lane, int, Call]]
    awaited: frozenset[tuple[Lane, int]]
    last: Sequence[tuple[Lane, int]]


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
    return IssueOrder(calls, frozenset(last).union(*(call.waits for _, _, call in calls)), last)


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
    found: list[Tensor] = []
    _gather(value, found)
    return found


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
    known: dict[type | tuple[type, ...], Gathering | None] = {
        Tensor: lambda value, found: found.append(value),
        Later: lambda value, found: _gather(value.holds, found),
        Task: None,  # behind edges that order tasks, and hand on nothing
        Mapping: lambda value, found: _gather_all(value.values(), found),
        (list, tuple): _gather_all,
    }
    for each, gathering in known.items():
        if issubclass(kind, each):
            return gathering
    if not is_dataclass(kind):
        return None
    names = [field.name for field in fields(kind)]
    return lambda value, found: _gather_all([getattr(value, name) for name in names], found)


def _gather_all(values: Iterable[Any], found: list[Tensor]) -> None:
    for each in values:
        _gather(each, found)
