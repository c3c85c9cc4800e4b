"""A task is a name: layer, op, microbatch, chunk, phase. Its text form is `L2.D.m0.c1.F`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from penstock.graph.errors import ScheduleError


class Lane(StrEnum):
    """What a task occupies while it runs. One lane runs one task at a time, in a fixed order."""

    COMPUTE = "compute"
    INTRA = "intra"
    INTER = "inter"
    HOST = "host"

    __hash__ = str.__hash__  # see Phase


class Phase(StrEnum):
    """F forward, B backward; where a backward is split, I makes the input gradients, W the weights'."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"

    __hash__ = str.__hash__  # Enum's own is Python code, and a plan hashes tasks by the million


class Group(StrEnum):
    """Which ranks a task has to meet before it can end.

    ep: the ranks that share a layer's experts. node: those of them in one node. rail: those with the same
    place in their nodes. edp: the replicas of an expert.
    """

    ALONE = "alone"
    EXPERT = "ep"
    NODE = "node"
    RAIL = "rail"
    EXPERT_REPLICAS = "edp"
    WORLD = "world"


class Op(StrEnum):
    """What a task does. `SPECS` says where it runs and with whom."""

    EMBED = "EM"
    ATTENTION = "AT"
    SHARED = "S"
    COUNTS = "N"
    DISPATCH_GATHER = "DG"
    DISPATCH = "D"
    DISPATCH_SCATTER = "DS"
    EXPERTS = "X"
    COMBINE_GATHER = "CG"
    COMBINE = "C"
    COMBINE_SCATTER = "CS"
    UNORDER = "U"
    HEAD = "HD"
    STATISTICS = "ST"
    ALL_REDUCE = "AR"
    EXPERT_ALL_REDUCE = "XR"

    __hash__ = str.__hash__  # see Phase


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """The fixed facts of an op: its lane, whom it meets, and which indices its name carries."""

    title: str
    lane: Lane
    group: Group = Group.ALONE
    phases: str = "FB"
    microbatch: bool = True
    chunk: bool = False


SPECS: dict[Op, OpSpec] = {
    Op.EMBED: OpSpec(title="token and position embedding", lane=Lane.COMPUTE),
    Op.ATTENTION: OpSpec(title="attention, router and order (a dense block: all of it)", lane=Lane.COMPUTE),
    Op.SHARED: OpSpec(title="shared experts", lane=Lane.COMPUTE),
    Op.COUNTS: OpSpec(title="exchange of tokens per expert", lane=Lane.INTER, group=Group.EXPERT, phases="F"),
    Op.DISPATCH_GATHER: OpSpec(
        title="dispatch inside the node, on the way out", lane=Lane.INTRA, group=Group.NODE, chunk=True
    ),
    Op.DISPATCH: OpSpec(title="tokens to their experts", lane=Lane.INTER, group=Group.EXPERT, chunk=True),
    Op.DISPATCH_SCATTER: OpSpec(
        title="dispatch inside the node, on arrival", lane=Lane.INTRA, group=Group.NODE, chunk=True
    ),
    Op.EXPERTS: OpSpec(title="expert computation", lane=Lane.COMPUTE, chunk=True, phases="FBIW"),
    Op.COMBINE_GATHER: OpSpec(
        title="combine inside the node, on the way out", lane=Lane.INTRA, group=Group.NODE, chunk=True
    ),
    Op.COMBINE: OpSpec(title="expert outputs back home", lane=Lane.INTER, group=Group.EXPERT, chunk=True),
    Op.COMBINE_SCATTER: OpSpec(
        title="combine inside the node, on arrival", lane=Lane.INTRA, group=Group.NODE, chunk=True
    ),
    Op.UNORDER: OpSpec(title="un-order, gate weights, residual", lane=Lane.COMPUTE),
    Op.HEAD: OpSpec(title="final norm, output head, loss", lane=Lane.COMPUTE),
    Op.STATISTICS: OpSpec(
        title="sums of loss, tokens and balance statistics",
        lane=Lane.INTER,
        group=Group.WORLD,
        phases="F",
        microbatch=False,
    ),
    Op.ALL_REDUCE: OpSpec(
        title="all-reduce of replicated gradients",
        lane=Lane.INTER,
        group=Group.WORLD,
        phases="B",
        microbatch=False,
        chunk=True,
    ),
    Op.EXPERT_ALL_REDUCE: OpSpec(
        title="all-reduce of expert gradients over their replicas",
        lane=Lane.INTER,
        group=Group.EXPERT_REPLICAS,
        phases="B",
        microbatch=False,
        chunk=True,
    ),
}

BACK_AGAIN: dict[Op, Op] = {
    Op.DISPATCH_GATHER: Op.COMBINE_SCATTER,
    Op.DISPATCH: Op.COMBINE,
    Op.DISPATCH_SCATTER: Op.COMBINE_GATHER,
}
"""Every leg of a dispatch and the leg of combine that takes the same way home."""

AWAY: dict[Op, Op] = {back: out for out, back in BACK_AGAIN.items()}
"""The other way round."""

_NUMBER = "(0|[1-9][0-9]*)"
_TEXT = re.compile(rf"L{_NUMBER}\.([A-Z]+)(?:\.m{_NUMBER})?(?:\.c{_NUMBER})?\.([FBIW])")


@dataclass(frozen=True)
class Task:
    """One cell of a schedule. It has no behaviour; what happens when it runs is its op's handler."""

    layer: int
    op: Op
    phase: Phase
    microbatch: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f".m{self.microbatch}"
        chunk = "" if self.chunk is None else f".c{self.chunk}"
        return f"L{self.layer}.{self.op}{microbatch}{chunk}.{self.phase}"

    @property
    def spec(self) -> OpSpec:
        return SPECS[self.op]

    @property
    def lane(self) -> Lane:
        return SPECS[self.op].lane

    @property
    def forward(self) -> bool:
        """Whether the task belongs to the forward half of a step."""
        return self.phase is Phase.FORWARD

    @property
    def symbol(self) -> str:
        """The letters that pictures show: the op, and W for weight gradients made apart."""
        return "W" if self.phase is Phase.WEIGHT else str(self.op)

    @property
    def cell(self) -> str:
        """The short name that a grid shows: the op with its indices, the layer for all-reduces."""
        if self.op in (Op.ALL_REDUCE, Op.EXPERT_ALL_REDUCE):
            return f"{self.symbol}{self.layer}.{self.chunk}"
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.symbol}{microbatch}{chunk}"

    @staticmethod
    def parse(text: str) -> Task:
        """Read the text form. Raises ScheduleError for a name that no task can have."""
        match = _TEXT.fullmatch(text)
        if match is None or match[2] not in set(Op):
            raise ScheduleError(f"{text!r} is not a task name; one looks like L2.D.m0.c1.F")
        layer, op, microbatch, chunk, phase = match.groups()
        task = Task(
            int(layer), Op(op), Phase(phase), *(None if v is None else int(v) for v in (microbatch, chunk))
        )
        _check_indices(task)
        return task


def _check_indices(task: Task) -> None:
    spec = task.spec
    for name, value, wanted in (
        ("microbatch", task.microbatch, spec.microbatch),
        ("chunk", task.chunk, spec.chunk),
    ):
        if (value is not None) != wanted:
            raise ScheduleError(f"{task}: op {task.op} has {'a' if wanted else 'no'} {name} index")
    if task.phase not in spec.phases:
        raise ScheduleError(f"{task}: op {task.op} has no phase {task.phase}")
