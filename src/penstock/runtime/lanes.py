"""Lanes: where tasks really run. The only file with threads, streams and events.

On a CPU every communication lane is a thread and the compute lane is the caller's thread. On a GPU every
lane is a stream, tasks are issued from one thread, and waiting is done by events on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.graph import Lane, Task
from penstock.graph.paths import issue_order

Orders = Mapping[Lane, Sequence[Task]]
Needs = Callable[[Task], Sequence[Task]]
Execute = Callable[[Task], Any]


@dataclass(frozen=True)
class Ran:
    """When a task ran, on the clock of `time.perf_counter`, on a GPU by its events."""

    task: Task
    start_s: float
    end_s: float


class LaneError(Exception):
    """A task raised. Carries the task, how long it ran, and the error as `__cause__`."""

    def __init__(self, task: Task, waited_s: float) -> None:
        super().__init__(str(task))
        self.task, self.waited_s = task, waited_s


class Lanes(Protocol):
    """Runs ordered tasks; each starts when what it needs, and its predecessor on the lane, are done."""

    def run(self, orders: Orders, needs: Needs, execute: Execute) -> Callable[[], list[Ran]]:
        """Run all tasks, then return; call the result for their times. Raises LaneError."""
        ...

    def close(self) -> None: ...


class ThreadLanes:
    """CPU lanes. `on_failure` must wake whoever waits inside a collective, so that no thread is left."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._workers: dict[Lane, _Worker] = {}

    def run(self, orders: Orders, needs: Needs, execute: Execute) -> Callable[[], list[Ran]]:
        run = _ThreadRun(orders, needs, execute, self._on_failure)
        busy = [self._worker(lane) for lane, order in orders.items() if order and lane is not Lane.COMPUTE]
        for worker in busy:
            worker.start(run.walk)
        try:
            run.walk(Lane.COMPUTE)
        except BaseException as error:  # an interrupt between two tasks
            run.interrupt(Lane.COMPUTE, error)
        for worker in busy:
            _settle(worker, run)
        if run.failure is not None:
            raise run.failure from run.failure.__cause__
        return lambda: run.ran

    def close(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()

    def _worker(self, lane: Lane) -> _Worker:
        if lane not in self._workers:
            self._workers[lane] = _Worker(lane)
        return self._workers[lane]


def _settle(worker: _Worker, run: _ThreadRun) -> None:
    """Wait until a lane has ended, also if an interrupt comes while waiting: that stops all lanes first."""
    while True:
        try:
            worker.finish()
            return
        except BaseException as error:
            run.interrupt(worker.lane, error)


class _Worker:
    """The thread of one communication lane; lives as long as its lanes."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._jobs: SimpleQueue[Callable[[Lane], None] | None] = SimpleQueue()
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name=f"penstock-{lane}", daemon=True)
        self._thread.start()

    def start(self, job: Callable[[Lane], None]) -> None:
        self._jobs.put(job)

    def finish(self) -> None:
        """Wait until the job is over; it always ends, a failure anywhere wakes it."""
        self._finished.get()

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job(self.lane)
            finally:
                self._finished.put(None)


class _ThreadRun:
    """One run over thread lanes: which tasks are done, and the first failure."""

    def __init__(
        self, orders: Orders, needs: Needs, execute: Execute, on_failure: Callable[[], None]
    ) -> None:
        self._orders, self._needs, self._execute, self._on_failure = orders, needs, execute, on_failure
        self._inside = {task for order in orders.values() for task in order}
        self._done: set[Task] = set()
        self._changed = Condition()
        self.failure: LaneError | None = None
        self.ran: list[Ran] = []

    def walk(self, lane: Lane) -> None:
        """Run one lane's list from front to back; stop early if any lane has failed."""
        for task in self._orders.get(lane, ()):
            try:
                if not self._wait(task):
                    return
            except BaseException as error:  # an interrupt while waiting stops all lanes, too
                self._fail(task, 0.0, error)
                return
            start_s = time.perf_counter()
            try:
                self._execute(task)
            except BaseException as error:
                self._fail(task, time.perf_counter() - start_s, error)
                return
            self._finish(Ran(task, start_s, time.perf_counter()))

    def interrupt(self, lane: Lane, error: BaseException) -> None:
        """Stop all lanes for something that came from outside while `lane` was under way."""
        under_way = [task for task in self._orders[lane] if task not in self._done]
        self._fail((under_way or self._orders[lane])[0], 0.0, error)

    def _wait(self, task: Task) -> bool:
        missing = [need for need in self._needs(task) if need in self._inside]
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or all(need in self._done for need in missing)
            )
            return self.failure is None

    def _finish(self, ran: Ran) -> None:
        with self._changed:
            self._done.add(ran.task)
            self.ran.append(ran)
            self._changed.notify_all()

    def _fail(self, task: Task, waited_s: float, error: BaseException) -> None:
        with self._changed:
            first = self.failure is None
            if first:
                self.failure = LaneError(task, waited_s)
                self.failure.__cause__ = error
            self._changed.notify_all()
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
    same order on all ranks. The host never waits here; only a handler that needs numbers on the host does.
    """

    def __init__(self, device: torch.device, on_failure: Callable[[], None]) -> None:
        self._device, self._on_failure = device, on_failure
        self._streams: dict[Lane, torch.cuda.Stream] = {}

    def run(self, orders: Orders, needs: Needs, execute: Execute) -> Callable[[], list[Ran]]:
        inside = {task for order in orders.values() for task in order}
        main = torch.cuda.current_stream(self._device)
        origin, origin_s = main.record_event(torch.cuda.Event(enable_timing=True)), time.perf_counter()
        ends: dict[Task, torch.cuda.Event] = {}
        starts: dict[Task, torch.cuda.Event] = {}
        for stream in self._streams.values():
            stream.wait_event(origin)

        def known(task: Task) -> Sequence[Task]:
            return [need for need in needs(task) if need in inside]

        for task in issue_order(orders, known):
            stream = main if task.lane is Lane.COMPUTE else self._stream(task.lane, origin)
            for need in known(task):
                if need.lane is not task.lane:
                    stream.wait_event(ends[need])
            starts[task] = stream.record_event(torch.cuda.Event(enable_timing=True))
            self._issue(task, stream, execute)
            ends[task] = stream.record_event(torch.cuda.Event(enable_timing=True))
        for order in orders.values():
            if order:
                main.wait_event(ends[order[-1]])
        return lambda: _elapsed(origin, origin_s, starts, ends)

    def close(self) -> None:
        self._streams.clear()

    def _stream(self, lane: Lane, origin: torch.cuda.Event) -> torch.cuda.Stream:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self._device)
            self._streams[lane].wait_event(origin)
        return self._streams[lane]

    def _issue(self, task: Task, stream: torch.cuda.Stream, execute: Execute) -> None:
        start_s = time.perf_counter()
        try:
            with torch.cuda.stream(stream):
                for tensor in tensors_in(execute(task)):
                    tensor.record_stream(stream)
        except BaseException as error:
            failure = LaneError(task, time.perf_counter() - start_s)
            _stop_others(self._on_failure, failure)
            raise failure from error


def _elapsed(
    origin: torch.cuda.Event,
    origin_s: float,
    starts: Mapping[Task, torch.cuda.Event],
    ends: Mapping[Task, torch.cuda.Event],
) -> list[Ran]:
    """Times of a run. Waits for the device: for traces and metrics only."""
    torch.cuda.synchronize()

    def since(event: torch.cuda.Event) -> float:
        return origin_s + float(origin.elapsed_time(event)) / 1e3

    return [Ran(task, since(start), since(ends[task])) for task, start in starts.items()]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside a handler's inputs: those must outlive the stream that reads them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
