"""Records what operations of torch do to memory: which task and stream, which bytes, read or written."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

# ---- what a recorded device was asked to do, in the order in which it was asked: the entries of a log -----
#
# An *actor* does things one after the other: a stream of the device, or a thread of the host. What two actors
# do is ordered only where one waits for the other.


@dataclass(frozen=True, slots=True)
class Actor:
    """A stream, or a thread of the host.

    Attributes:
        number: From 0, in the order in which they were first seen.
    """

    number: int
    name: str
    on_device: bool

    def __str__(self) -> str:
        return f"stream {self.name}" if self.on_device else f"thread {self.name}"


@dataclass(frozen=True, slots=True)
class Block:
    """Memory of one storage, from when it was allocated to when it was freed.

    Attributes:
        number: From 0; none is used twice.
        task: What allocated it.
        stream: The current one then, to which the allocator gives the memory back.
        shape, dtype: Of the first tensor there.
        in_host: Whether it is memory of the host.
    """

    number: int
    task: str
    stream: Actor
    shape: tuple[int, ...]
    dtype: str
    in_host: bool

    def __str__(self) -> str:
        where = " of the host" if self.in_host else ""
        return f"{self.dtype} {list(self.shape)}{where}, allocated by {self.task} on {self.stream}"


class Span(NamedTuple):
    """Bytes of a block that a tensor covers: from `first` up to `end`, and of these only what strides meet.

    Attributes:
        strides: In bytes, where elements do not lie side by side; () = all bytes between are covered.
    """

    first: int
    end: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    element_bytes: int = 1


class Access(NamedTuple):
    """A read or a write of a part of a block."""

    block: Block
    span: Span
    writes: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A collective of one rank.

    Attributes:
        communicator: Its name, the same on all its ranks.
        ranks: In their order.
        op: With what must be the same on all of them.
        sent_bytes, received_bytes: By place in the communicator.
        exchange: Of a message between two ranks, whose communicator is theirs in this direction, the name of
            the process group through which it goes.
    """

    communicator: str
    ranks: tuple[int, ...]
    op: str
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    exchange: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation that `thread` puts into a stream, or does itself: then `actor` is the thread."""

    actor: Actor
    thread: Actor
    task: str
    op: str
    accesses: tuple[Access, ...]
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Allocate:
    """A block gets memory that is free in the pool of its stream."""

    block: Block
    thread: Actor


@dataclass(frozen=True, slots=True)
class Free:
    """The last reference to a block is gone: its memory may be used again.

    Attributes:
        task: What held it.
    """

    block: Block
    task: str
    thread: Actor


@dataclass(frozen=True, slots=True)
class Keep:
    """`record_stream`: when the block is freed, its memory waits for what is in the stream by then."""

    block: Block
    stream: Actor
    task: str


@dataclass(frozen=True, slots=True)
class Record:
    """An event is put after all that `actor` has been given so far."""

    event: int
    actor: Actor
    thread: Actor


@dataclass(frozen=True, slots=True)
class Wait:
    """All that `actor` is given later waits for an event. task: what it is given next."""

    event: int
    actor: Actor
    thread: Actor


Entry = Launch | Allocate | Free | Keep | Record | Wait


# ---- the recorder -----------------------------------------------------------------------------------------


OUTSIDE = "outside of tasks"


class Recorder:
    """Writes a log of what threads do and ask of a device.

    Attributes:
        control_group: The name of a process group whose exchanges are the host's own, and none of the device.
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
                size = tensor.element_size()
                first = int(tensor.storage_offset()) * size
                if tensor.is_contiguous():
                    span = Span(first, first + tensor.numel() * size)
                else:
                    strides = [stride * size for stride in tensor.stride()]
                    end = first + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + size
                    span = Span(first, end, tuple(tensor.shape), tuple(strides), size)
                yield Access(self._block(tensor), span, writes)

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
            # Gloo does not know a gather of parts of several sizes.
            uneven = name == "allgather_" and len({tensor.numel() for tensor in args[0][0]}) > 1
            out = gather_unevenly(args) if uneven else func(*args, **kwargs)
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


# ---- what the operators of torch.distributed read, write and send, as arguments of a dispatched operator
# say


@dataclass(frozen=True)
class Collective:
    """One call of this rank.

    Attributes:
        sent, received: Bytes by place in the group, where they may differ by rank.
        message: Of a message, the places of its sender and its receiver.
    """

    group: ProcessGroup
    op: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    sent: Sequence[int]
    received: Sequence[int]
    message: tuple[int, int] | None = None

    @property
    def call(self) -> Call:
        """The call as it stands in a log; a message as a call of a communicator of its two ranks alone."""
        name, ranks = self.group.group_name, tuple(dist.get_process_group_ranks(self.group))
        if self.message is None:
            return Call(name, ranks, self.op, tuple(self.sent), tuple(self.received))
        places = self.message
        pair = ranks[places[0]], ranks[places[1]]
        sent, received = (tuple(of[place] for place in places) for of in (self.sent, self.received))
        return Call(f"{name}, rank {pair[0]} to {pair[1]}", pair, self.op, sent, received, name)


def collective_of(name: str, args: Sequence[Any]) -> Collective:
    """Return what a c10d operator does.

    Raises:
        KeyError: For one that is not known here.
    """
    op, message = "all_gather", None
    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()
    match name:
        case "allreduce_":
            tensors, group = args[0], _group(args[1])
            op, writes = f"all_reduce {tensors[0].dtype}", tensors
            sent = received = [sum(tensor.nbytes for tensor in tensors)] * group.size()
        case "broadcast_":
            tensors, group, root = args[0], _group(args[1]), args[2]
            size_bytes, is_root = sum(tensor.nbytes for tensor in tensors), group.rank() == root
            op = f"broadcast from {root}"
            reads, writes = (tensors, ()) if is_root else ((), tensors)
            sent = [size_bytes if is_root else 0] * group.size()
            received = [size_bytes if place == root else 0 for place in range(group.size())]
        case "allgather_":
            (writes,), reads, group = args[0], args[1], _group(args[2])
            sent, received = [reads[0].nbytes] * group.size(), [tensor.nbytes for tensor in writes]
        case "_allgather_base_":
            writes, reads, group = (args[0],), (args[1],), _group(args[2])
            sent, received = [args[1].nbytes] * group.size(), _even(args[0], group)
        case "_reduce_scatter_base_":
            writes, reads, group = (args[0],), (args[1],), _group(args[2])
            op = f"reduce_scatter {args[0].dtype}"
            sent, received = _even(args[1], group), [args[0].nbytes] * group.size()
        case "alltoall_base_":
            op, writes, reads, group = "all_to_all", (args[0],), (args[1],), _group(args[2])
            sent, received = _bytes(args[1], args[4], group), _bytes(args[0], args[3], group)
        case "send" | "recv_":
            tensors, group, peer = args[0], _group(args[1]), args[2]
            size_bytes, nothing = sum(tensor.nbytes for tensor in tensors), [0] * group.size()
            op, moved = "message", [size_bytes if place == peer else 0 for place in range(group.size())]
            if name == "send":
                reads, sent, received, message = tensors, moved, nothing, (group.rank(), peer)
            else:
                writes, sent, received, message = tensors, nothing, moved, (peer, group.rank())
        case _:
            raise KeyError(name)
    return Collective(group, op, reads, writes, sent, received, message)


def _group(script_object: Any) -> ProcessGroup:
    group: ProcessGroup = ProcessGroup.unbox(script_object)
    return group


def _even(tensor: Tensor, group: ProcessGroup) -> list[int]:
    return [tensor.nbytes // group.size()] * group.size()


def _bytes(tensor: Tensor, splits: Sequence[int], group: ProcessGroup) -> list[int]:
    """Return the bytes of the shares of a tensor that is cut along its first dimension; no splits: evenly."""
    if not splits:
        return _even(tensor, group)
    row_bytes = tensor[:1].nbytes
    return [split * row_bytes for split in splits]


def gather_unevenly(args: Sequence[Any]) -> Any:
    """Gather parts of several sizes as NCCL does, by one broadcast from every rank."""
    (inbox,), (mine,), group = args[0], args[1], args[2]
    inbox[_group(group).rank()].copy_(mine)
    for place, part in enumerate(inbox):
        if part.numel():
            _, work = torch.ops.c10d.broadcast_.default([part], group, place, 0, True)
            dist.Work.unbox(work).wait()
    return args[0], work
