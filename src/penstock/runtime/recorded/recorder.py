"""Records what operations of torch do to memory: which task and stream, which bytes, read or written."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runtime.recorded.collectives import collective_of, gather_unevenly, runs_unevenly
from penstock.runtime.recorded.log import (
    Access,
    Actor,
    Allocate,
    Block,
    Call,
    Entry,
    Free,
    Keep,
    Launch,
    Record,
    Span,
    Wait,
)

OUTSIDE = "outside of tasks"


class Recorder:
    """Writes a log of what threads do and ask of a device.

    control_group: the name of a process group whose exchanges are the host's own, and none of the device.
    """

    def __init__(self, control_group: str | None = None) -> None:
        self.control_group = control_group
        self.log: list[Entry] = []
        self.main = Actor(0, "main", on_device=True)
        self._actors: dict[object, Actor] = {}
        self._blocks: dict[int, Block] = {}
        self._ends: dict[int, weakref.finalize[..., Any]] = {}
        self._count = self._events = 0
        self._here = threading.local()
        self._lock = threading.Lock()

    # ---- who does something ----

    def new_stream(self, name: str) -> Actor:
        """Return another stream of the device."""
        return self._actor(object(), name, on_device=True)

    @property
    def thread(self) -> Actor:
        """The thread of the host that asks."""
        name = threading.current_thread().name
        return self._actor(threading.get_ident(), name, on_device=False)

    @property
    def stream(self) -> Actor:
        """The current stream of this thread."""
        found: Actor = getattr(self._here, "stream", self.main)
        return found

    @property
    def task(self) -> str:
        """What this thread runs."""
        found: str = getattr(self._here, "task", OUTSIDE)
        return found

    @contextmanager
    def running(self, task: object, stream: Actor) -> Iterator[None]:
        """Put what this thread does inside into `stream`, as part of `task`."""
        before = self.stream, self.task
        self._here.stream, self._here.task = stream, str(task)
        try:
            yield
        finally:
            self._here.stream, self._here.task = before

    def _actor(self, key: object, name: str, *, on_device: bool) -> Actor:
        with self._lock:
            if key not in self._actors:
                self._actors[key] = Actor(len(self._actors) + 1, name, on_device)
            return self._actors[key]

    # ---- what is ordered ----

    def record(self, actor: Actor) -> int:
        """Put an event after everything that `actor` has been given; return its number."""
        with self._lock:
            self._events += 1
            event = self._events
        self.log.append(Record(event, actor, self.thread))
        return event

    def wait(self, actor: Actor, event: int) -> None:
        """Let everything that `actor` is given later wait for an event."""
        self.log.append(Wait(event, actor, self.thread))

    # ---- memory ----

    def keep(self, tensor: Tensor, stream: Actor) -> None:
        """Record that the tensor's memory is not used again before `stream` has done what is in it."""
        if _has_memory(tensor):
            self.log.append(Keep(self._block(tensor), stream, self.task))

    def in_host(self, tensor: Tensor) -> Tensor:
        """Take the tensor's memory as memory of the host, which its threads read and write at once."""
        if _has_memory(tensor):
            self._add(tensor, in_host=True)
        return tensor

    def is_in_host(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory is known to be the host's."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return block is not None and block.in_host

    def _block(self, tensor: Tensor) -> Block:
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return self._add(tensor, in_host=False) if block is None else block

    def _add(self, tensor: Tensor, *, in_host: bool) -> Block:
        storage = tensor.untyped_storage()
        with self._lock:
            self._count += 1
        kind = str(tensor.dtype).removeprefix("torch.")
        block = Block(self._count - 1, self.task, self.stream, tuple(tensor.shape), kind, in_host)
        self._blocks[storage._cdata] = block
        self._ends[storage._cdata] = end = weakref.finalize(storage, self._free, storage._cdata, block)
        end.atexit = False
        return block

    def _free(self, address: int, block: Block) -> None:
        del self._blocks[address], self._ends[address]
        self.log.append(Free(block, self.task, self.thread))

    def close(self) -> None:
        """Stop watching memory that is still in use."""
        for end in self._ends.values():
            end.detach()
        self._ends.clear()
        self._blocks.clear()

    # ---- operations ----

    def launch(
        self, op: str, reads: Iterable[Tensor], writes: Iterable[Tensor], call: Call | None = None
    ) -> None:
        """Record an operation of this thread: on the host if all its memory is there, else in its stream."""
        accesses = [*self._accesses(writes, writes=True), *self._accesses(reads, writes=False)]
        if not accesses and call is None:
            return
        thread = self.thread
        here = bool(accesses) and all(access.block.in_host for access in accesses)
        actor = thread if here else self.stream
        self.log.append(Launch(actor, thread, self.task, op, tuple(accesses), call))

    def read_by_host(self, op: str, tensor: Tensor) -> None:
        """Record that the host reads a tensor's numbers, which it waits for if they are on the device."""
        self.launch(op, [tensor], [])
        if not self.is_in_host(tensor):
            self.wait(self.thread, self.record(self.stream))

    def _accesses(self, tensors: Iterable[Tensor], *, writes: bool) -> Iterator[Access]:
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.numel():
                yield Access(self._block(tensor), _span(tensor), writes)

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Take memory that is not known yet as memory of the device that was there before."""
        for tensor in tensors:
            if _has_memory(tensor):
                self._block(tensor)

    def made(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Record allocations for those tensors whose memory is not known yet, and return them."""
        fresh = []
        for tensor in tensors:
            if _has_memory(tensor) and tensor.untyped_storage()._cdata not in self._blocks:
                self.log.append(Allocate(self._add(tensor, in_host=False), self.thread))
                fresh.append(tensor)
        return fresh


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > 0


def _span(tensor: Tensor) -> Span:
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return Span(first, first + tensor.numel() * size)
    strides = [stride * size for stride in tensor.stride()]
    end = first + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + size
    return Span(first, end, tuple(tensor.shape), tuple(strides), size)


WAITING = (
    "aten._local_scalar_dense",
    "aten.equal",
    "aten.is_nonzero",
    "aten.masked_select",
    "aten.nonzero",
    "aten._unique2",
    "aten.bincount",
)
"""Operators whose results the host needs at once, so that it waits for the current stream."""


class Recording(TorchDispatchMode):
    """Sees every operation of the thread in which it is entered."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            found = None if name == "barrier" else collective_of(name, args)
            if found is None or found.group.group_name == self._recorder.control_group:
                return func(*args, **kwargs)
            out = gather_unevenly(args) if runs_unevenly(name, args) else func(*args, **kwargs)
            self._recorder.launch(found.op, found.reads, found.writes, found.call)
            return out
        recorder, operator = self._recorder, _operator(func)
        reads, writes = operator.operands(args, kwargs)
        recorder.know(reads)
        recorder.know(writes)
        out = func(*args, **kwargs)
        results = list(_tensors(out))
        fresh = recorder.made(results)
        if operator.allocates:
            return out
        if writes or fresh or not results:  # else a view, which touches no memory
            recorder.launch(operator.name, reads, [*writes, *fresh])
        # The host waits for a copy between its memory and the device's, unless told otherwise.
        in_host = {recorder.is_in_host(tensor) for tensor in args[:2]} if operator.copies else ()
        if operator.waits or (len(in_host) == 2 and not (len(args) > 2 and args[2])):
            recorder.wait(recorder.thread, recorder.record(recorder.stream))
        return out


ALLOCATING = ("aten.empty", "aten.new_empty")
"""Operators that allocate memory and leave it as it is."""


@dataclass(frozen=True)
class _Operator:
    """What is known of one of torch's operators before it is called: to ask anew in every call takes longer
    than to compute.

    arguments: their names, and whether each is written in place. grads: the argument that is written only
    where it is scaled. allocates: and leaves the memory as it is. waits: the host does, for its result.
    copies: it is `copy_`.
    """

    name: str
    arguments: tuple[tuple[str, bool], ...]
    grads: str
    allocates: bool
    waits: bool
    copies: bool

    def operands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that the operator reads and those that it writes in place."""
        reads, writes = list[Tensor](), list[Tensor]()
        for position, (name, is_written) in enumerate(self.arguments):
            given = args[position] if position < len(args) else kwargs.get(name)
            if given is None:
                continue
            scaled = name == self.grads and kwargs.get("grad_scale") is not None  # they are divided by it
            (writes if is_written or scaled else reads).extend(_tensors(given))
        return reads, writes


@cache
def _operator(func: Any) -> _Operator:
    name, schema = str(func), func._schema
    grads = "grads" if "_fused_adam" in schema.name else ""
    aliases = ((each.name, each.alias_info) for each in schema.arguments)
    return _Operator(
        name=name,
        arguments=tuple(
            (argument, alias is not None and alias.is_write and argument != grads)
            for argument, alias in aliases
        ),
        grads=grads,
        allocates=name.startswith(ALLOCATING),
        waits=name.startswith(WAITING),
        copies=name.startswith("aten.copy_"),
    )


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):  # most often
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
