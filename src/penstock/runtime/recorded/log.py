"""What a recorded device was asked to do, in the order in which it was asked: the entries of a log.

An *actor* does things one after the other: a stream of the device, or a thread of the host. What two actors
do is ordered only where one waits for the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Actor:
    """A stream, or a thread of the host. number: from 0, in the order in which they were first seen."""

    number: int
    name: str
    on_device: bool

    def __str__(self) -> str:
        return f"stream {self.name}" if self.on_device else f"thread {self.name}"


@dataclass(frozen=True, slots=True)
class Block:
    """Memory of one storage, from when it was allocated to when it was freed.

    number: from 0; none is used twice. task: what allocated it. stream: the current one then, to which the
    allocator gives the memory back. shape, dtype: of the first tensor there. in_host: whether it is memory of
    the host.
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

    strides: in bytes, where elements do not lie side by side; () = all bytes between are covered.
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
    """A collective of one rank. communicator: its name, the same on all its ranks. ranks: in their order.

    op: with what must be the same on all of them. sent_bytes, received_bytes: by place in the communicator.
    exchange: of a message between two ranks, whose communicator is theirs in this direction, the name of the
    process group through which it goes.
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
    """The last reference to a block is gone: its memory may be used again. task: what held it."""

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
