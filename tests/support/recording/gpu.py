"""A device that is none: it runs the code for GPUs on tensors of the CPU and records what that code asks for.

    with recorded() as recorder:
        ...  # build a model and run steps, on all ranks
    hazards = find_hazards(recorder.log)

Operations run at once, one after the other, in the order in which they are issued, so numbers are those of a
CPU. Streams, events and `record_stream` only write the log. Collectives run over Gloo. What a device could do
in another order is found in the log afterwards (`hazards.py`).

What is not seen: tensors on the wrong device, since all are on the CPU; and how long anything takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Generic, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from penstock.device import Cpu, Event, Gpu, Pending, Stream, using
from penstock.runtime.sockets import Sockets
from tests.support.recording.recorder import Actor, Recorder, Recording

P = ParamSpec("P")
T = TypeVar("T")


class RecordedStream:
    """A stream of which only the log knows."""

    def __init__(self, recorder: Recorder, actor: Actor) -> None:
        self._recorder, self.actor = recorder, actor

    def wait_event(self, event: Event, /) -> None:
        self._recorder.wait(self.actor, cast(RecordedEvent, event).number)

    def record_event(self, event: Event, /) -> Event:
        cast(RecordedEvent, event).happens_after(self.actor)
        return event


class RecordedEvent:
    """An event of which only the log knows.

    Attributes:
        number: In the log; 0 = it was not recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self.number, self.at_s = recorder, 0, 0.0

    def happens_after(self, actor: Actor) -> None:
        """Put it after everything that an actor has been given so far."""
        self.number, self.at_s = self._recorder.record(actor), time.perf_counter()  # noqa: TID251 - as torch events do

    def synchronize(self) -> None:
        self._recorder.wait(self._recorder.thread, self.number)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event, /) -> float:
        return 1e3 * (cast(RecordedEvent, end_event).at_s - self.at_s)


class RecordedGpu(Gpu, Cpu):
    """Stands for the CPU, in whose memory everything is, and says that it is a GPU."""

    is_cpu, collectives = False, "gloo"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._streams = {recorder.main: RecordedStream(recorder, recorder.main)}
        self._sockets = Sockets.now()

    def current_stream(self, device: torch.device) -> Stream:
        del device
        return self._streams[self._recorder.stream]

    def new_stream(self, device: torch.device, name: str) -> Stream:
        del device
        actor = self._recorder.new_stream(name)
        self._streams[actor] = RecordedStream(self._recorder, actor)
        return self._streams[actor]

    def running(self, task: object, stream: Stream) -> AbstractContextManager[None]:
        return self._recorder.running(task, cast(RecordedStream, stream).actor)

    def event(self, *, timed: bool) -> Event:
        del timed
        return RecordedEvent(self._recorder)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self._recorder.keep(tensor, cast(RecordedStream, stream).actor)

    def submit(self, threads: Executor, task: object, work: Callable[[], T]) -> Pending[T]:
        recorder, stream = self._recorder, self._recorder.stream
        begun, ended = recorder.record(recorder.thread), list[int]()

        def run() -> T:
            recorder.wait(recorder.thread, begun)
            with Recording(recorder), recorder.running(task, stream):
                try:
                    return work()
                finally:
                    ended.append(recorder.record(recorder.thread))

        return _Handover(recorder, threads.submit(run), ended)

    def abort(self, group: ProcessGroup) -> None:
        """Cut all connections that were made while this device stood for the CPU: Gloo has no other way."""
        del group
        Sockets.now().since(self._sockets).cut()

    def synchronize(self, device: torch.device) -> None:
        del device
        for stream in self._streams:
            self._recorder.wait(self._recorder.thread, self._recorder.record(stream))

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            return self._recorder.in_host(torch.empty(tuple(shape), dtype=dtype))

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Event | None]:
        return Gpu.to_host(self, tensor)

    def from_host(self, numbers: Tensor, device: torch.device) -> Tensor:
        if self._recorder.is_in_host(numbers):
            self._recorder.read_by_host("from_host", numbers)
        with _disable_current_modes():
            pinned = self._recorder.in_host(numbers.clone())
        return torch.empty_like(pinned, device=device).copy_(pinned, non_blocking=True)

    def name(self, device: torch.device) -> str:
        del device
        return "recorded"

    def has_grouped_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        del device
        return dtype in (torch.bfloat16, torch.float32)


class _Handover(Generic[T]):
    """The result of work on another thread; who waits for it knows that all of that work has ended."""

    def __init__(self, recorder: Recorder, future: Future[T], ended: Sequence[int]) -> None:
        self._recorder, self._future, self._ended = recorder, future, ended

    def result(self) -> T:
        try:
            return self._future.result()
        finally:
            self._recorder.wait(self._recorder.thread, self._ended[0])


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Let a recorded GPU stand for the CPU, and record what this thread does and what it gives to others.

    Streams and events must be made inside, so a stack must be built there. Exchanges of the default process
    group are taken as the host's own. One recording at a time in a process.
    """
    everyone = dist.group.WORLD if dist.is_initialized() else None
    recorder = Recorder(None if everyone is None else everyone.group_name)
    with using(RecordedGpu(recorder)), Recording(recorder), _reads_seen(recorder):
        try:
            yield recorder
        finally:
            recorder.close()


@contextmanager
def _reads_seen(recorder: Recorder) -> Iterator[None]:
    """Record how the host reads tensors by functions of torch that are no operators."""

    def seen(read: Callable[P, T]) -> Callable[P, T]:
        @wraps(read)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            recorder.read_by_host(read.__name__, cast(Tensor, args[0]))
            return read(*args, **kwargs)

        return wrapped

    plain = {name: getattr(Tensor, name) for name in ("numpy", "tolist", "cpu")}
    for name, read in plain.items():
        setattr(Tensor, name, seen(read))
    try:
        yield
    finally:
        for name, read in plain.items():
            setattr(Tensor, name, read)
