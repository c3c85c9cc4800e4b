"""Names, tasks and lanes. A task says everything about itself: where it runs, whom it meets, what it reads.

A name is `L2.D.m0.c1.F`: layer, op, the indices of its pieces, phase. A task is a name with its lane, the
mesh axes along which it meets other ranks, and its inputs by role:

    L2.D.m0.c1.F inter ep rows=L2.AT.m0.F route=L2.N.m0.F

A role is the name of the output that is read: `rows=L2.AT.m0.F` is the output `rows` of that task, and in the
backward half `d_rows=L2.X.m0.c1.B` is the gradient that this task made for its input `rows`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple


class ScheduleError(ValueError):
    """A task name, a graph or a schedule that cannot be right. The message names the task."""


class RefusalError(ScheduleError):
    """A request of a decision that this step cannot fulfil. The message says why."""


class Lane(StrEnum):
    """What a task occupies while it runs. One lane runs one task at a time, in a fixed order."""

    COMPUTE = "compute"
    INTRA = "intra"
    INTER = "inter"
    HOST = "host"

    __hash__ = str.__hash__  # see Phase

    @property
    def is_inside(self) -> bool:
        """Whether its transfers stay inside a node, of which there are several."""
        return self is Lane.INTRA

    @property
    def computes(self) -> bool:
        """Whether the model's own computation runs on this lane."""
        return self is Lane.COMPUTE

    @property
    def is_issued(self) -> bool:
        """Whether tasks of this lane are given to a device, where there is one; others run on the host."""
        return self is not Lane.HOST

    @property
    def is_network(self) -> bool:
        """Whether this lane stands for links between ranks."""
        return self in (Lane.INTRA, Lane.INTER)


class Phase(StrEnum):
    """F forward, B backward; where a backward is split, I makes the input gradients, W the weight gradients.

    R recomputes a forward task, just before its backward, for what the forward task has not kept.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    RECOMPUTE = "R"

    __hash__ = str.__hash__  # Enum's own is Python code, and a plan hashes tasks by the million


_NUMBER = "(0|[1-9][0-9]{0,8})"
_TEXT = re.compile(
    rf"L{_NUMBER}\.([A-Z][A-Z0-9]*)(?:\.m{_NUMBER})?(?:\.c{_NUMBER})?(?:\.p{_NUMBER})?\.([FBIWR])"
)


class Name(NamedTuple):
    """The name of a task.

    Attributes:
        microbatch, chunk, piece: The index of the task along that axis; None = it is not cut there.
    """

    layer: int
    op: str
    phase: Phase
    microbatch: int | None = None
    chunk: int | None = None
    piece: int | None = None

    def __str__(self) -> str:
        axes = (("m", self.microbatch), ("c", self.chunk), ("p", self.piece))
        indices = "".join(f".{letter}{index}" for letter, index in axes if index is not None)
        return f"L{self.layer}.{self.op}{indices}.{self.phase}"

    @property
    def back(self) -> Name:
        """The name of the backward of the same piece."""
        return self._replace(phase=Phase.BACKWARD)

    @staticmethod
    def parse(text: str) -> Name:
        """Parse the text form.

        Raises:
            ScheduleError: For text that is no task name.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text[:80]!r} is not a task name; one looks like L2.D.m0.c1.F")
        layer, op, *indices, phase = match.groups()
        return Name(int(layer), op, Phase(phase), *(None if i is None else int(i) for i in indices))


@dataclass(frozen=True, slots=True)
class Cut:
    """How the step around a task is cut, and which part the task has.

    Attributes:
        microbatches: The number of microbatches into which the batch is cut.
        slices: The number of slices into which a microbatch's rows are cut in an MoE layer; the task has
            those from `first` up to `stop`.
        parts: The relative sizes of the pieces of a buffer; the task has the piece that its name says.
        token_shards: The ranks that share the tokens of every sample; the task has this rank's part of them.
        row_copies: How many times the task has the rows of one rank: once per shard of an expert, where each
            rank sends its own rows to all shards or has the rows of all.
    """

    microbatches: int = 1
    slices: int = 1
    first: int = 0
    stop: int = 1
    parts: tuple[int, ...] = (1,)
    token_shards: int = 1
    row_copies: int = 1

    @property
    def text(self) -> str:
        """The whole cut as one string."""
        parts = ",".join(map(str, self.parts))
        tokens = f" 1/{self.token_shards}t" if self.token_shards > 1 else ""
        rows = f" {self.row_copies}r" if self.row_copies > 1 else ""
        return f"{self.microbatches}m {self.first}-{self.stop}/{self.slices}s [{parts}]{tokens}{rows}"

    @property
    def held(self) -> range:
        """The slices that the task has."""
        return range(self.first, self.stop)

    @property
    def chunks(self) -> int:
        """The number of chunks into which the slices are cut; the task has one of them."""
        return self.slices // (self.stop - self.first)


WHOLE = Cut()
Inputs = Mapping[str, tuple[Name, ...]]


@dataclass(frozen=True, slots=True)
class Task:
    """One cell of a schedule. It has no behaviour; what happens when it runs is its op's handler.

    Attributes:
        axes: The axes of the mesh along which it meets other ranks; () = it meets none.
        inputs: The names of the tasks whose outputs it reads, by role.
        accumulates, reads, writes: The named mutable state that it adds to, reads and changes; of a buffer
            cut into pieces, its own piece only. See `graph.check_state`.
    """

    name: Name
    lane: Lane
    axes: tuple[str, ...] = ()
    inputs: Inputs = field(default_factory=dict)
    cut: Cut = WHOLE
    accumulates: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.name))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the task as its fields, not its hash: strings have other hashes in other processes."""
        touched = self.accumulates, self.reads, self.writes
        return Task, (self.name, self.lane, self.axes, self.inputs, self.cut, *touched)

    def __str__(self) -> str:
        return str(self.name)

    @property
    def text(self) -> str:
        """The task in full: what ranks compare, and what `Graph.text` shows."""
        inputs = " ".join(f"{role}={','.join(map(str, names))}" for role, names in self.inputs.items())
        return f"{self.name} {self.lane} {'x'.join(self.axes) or '-'} {inputs}".rstrip()

    @property
    def layer(self) -> int:
        return self.name.layer

    @property
    def op(self) -> str:
        return self.name.op

    @property
    def phase(self) -> Phase:
        return self.name.phase

    @property
    def microbatch(self) -> int | None:
        return self.name.microbatch

    @property
    def chunk(self) -> int | None:
        return self.name.chunk

    @property
    def piece(self) -> int | None:
        return self.name.piece

    @property
    def forward(self) -> bool:
        """Whether the task belongs to the forward half of a step."""
        return self.name.phase is Phase.FORWARD

    @property
    def meets(self) -> bool:
        """Whether the task ends together with the same task on other ranks."""
        return bool(self.axes)

    @property
    def symbol(self) -> str:
        """The letters that pictures show: the op, in lower case where it is recomputed, and W for weight
        gradients made separately."""
        if self.phase is Phase.RECOMPUTE:
            return self.op.lower()
        return "W" if self.phase is Phase.WEIGHT else self.op

    @property
    def cell(self) -> str:
        """The short name that a grid shows: the op with its indices, the layer for pieces of a buffer."""
        if self.piece is not None:
            return f"{self.symbol}{self.layer}.{self.piece}"
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.symbol}{microbatch}{chunk}"

    def sources(self) -> Iterator[Name]:
        """Return every task that this one reads, each once, in the order of its roles."""
        return iter(dict.fromkeys(chain.from_iterable(self.inputs.values())))

    def reading(self, inputs: Inputs) -> Task:
        """Return this task with other inputs."""
        touched = self.accumulates, self.reads, self.writes
        return Task(self.name, self.lane, self.axes, inputs, self.cut, *touched)
