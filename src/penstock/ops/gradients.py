"""Kinds of gradients, one row each: their state, the ranks that sum them, and the op of every step of theirs.

Whole sums are left on every rank by `reduce`. Where the optimiser is sharded, `scatter` leaves every rank its
share of the sum, `update` changes that share of the parameters, and `gather` brings all shares together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from penstock.graph.task import Task
from penstock.mesh import Axes, Group
from penstock.ops.base import Backward, Family, Kind, OpSpec, register
from penstock.ops.blocks import EXPERTS, PARTIAL, REPLICATED
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work

KindName = Literal["replicated", "partial", "experts"]


@dataclass(frozen=True, kw_only=True)
class GradientKind:
    """One kind of gradients.

    Attributes:
        name: Its name.
        what: What is summed, for people.
        state: The buffer of a layer's gradients, `{layer}` for its number.
        axes: The axes of the ranks that sum it.
        sharing_axes: The axes of the ranks that sum it, where ranks share attention.
        reduce: The op that leaves the whole sum on every rank.
        scatter: The op that leaves every rank its share of the sum.
        update: The op that updates a rank's share of the parameters.
        gather: The op that gathers the parameters from all shares.
        usual_pieces: Into how many pieces a layer's gradients are cut where a step does not say.
    """

    name: KindName
    what: str
    state: str
    axes: Axes
    sharing_axes: Axes
    reduce: str
    scatter: str
    update: str
    gather: str
    usual_pieces: int

    def axes_of(self, *, sharing: bool) -> Axes:
        """Return the axes of the ranks that sum the buffer.

        Args:
            sharing: Whether ranks share attention.
        """
        return self.sharing_axes if sharing else self.axes

    def sums(self, *, scatters: bool) -> str:
        """Return the op that sums.

        Args:
            scatters: Whether every rank keeps its share alone.
        """
        return self.scatter if scatters else self.reduce


GRADIENT_KINDS: Final[dict[KindName, GradientKind]] = {
    kind.name: kind
    for kind in (
        GradientKind(
            name="replicated",
            what="replicated gradients",
            state=REPLICATED,
            axes=Group.WORLD,
            sharing_axes=Group.DATA,
            reduce=Op.ALL_REDUCE,
            scatter=Op.SCATTER,
            update=Op.UPDATE,
            gather=Op.PARAMETERS,
            usual_pieces=1,
        ),
        GradientKind(
            name="partial",
            what="gradients that ranks sharing attention have parts of",
            state=PARTIAL,
            axes=Group.WORLD,
            sharing_axes=Group.WORLD,
            reduce=Op.PARTIAL_ALL_REDUCE,
            scatter=Op.PARTIAL_SCATTER,
            update=Op.PARTIAL_UPDATE,
            gather=Op.PARTIAL_PARAMETERS,
            usual_pieces=1,
        ),
        GradientKind(
            name="experts",
            what="expert gradients over their replicas",
            state=EXPERTS,
            axes=Group.EXPERT_DATA,
            sharing_axes=Group.EXPERT_DATA,
            reduce=Op.EXPERT_ALL_REDUCE,
            scatter=Op.EXPERT_SCATTER,
            update=Op.EXPERT_UPDATE,
            gather=Op.EXPERT_PARAMETERS,
            usual_pieces=0,  # most experts have no copy on another rank
        ),
    )
}
"""Every kind of gradients that ranks sum.

Each of the ranks that share attention has its shard of the replicated gradients, or all gradients of what
they compute alike: these are summed over other samples only. Of the partial gradients each rank has what its
heads or its tokens add.
"""

_KINDS: Final = GRADIENT_KINDS.values()
_KIND_OF: Final = {
    op: kind for kind in _KINDS for op in (kind.reduce, kind.scatter, kind.update, kind.gather)
}
_SUMMED: Final = {op: kind.name for kind in _KINDS for op in (kind.reduce, kind.scatter)}


class ByKind(Mapping[KindName, tuple[int, ...]]):
    """For kinds of gradients, a number for every layer. It can be hashed, since equal steps share a graph.

    Args:
        numbers: The numbers by kind.
    """

    def __init__(self, numbers: Mapping[KindName, tuple[int, ...]]) -> None:
        self._numbers = {name: numbers[name] for name in GRADIENT_KINDS if name in numbers}

    def __getitem__(self, name: KindName) -> tuple[int, ...]:
        return self._numbers[name]

    def __iter__(self) -> Iterator[KindName]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __hash__(self) -> int:
        return hash(tuple(self._numbers.items()))

    def __repr__(self) -> str:
        return repr(self._numbers)


def kind_of(op: str) -> GradientKind | None:
    """Return the kind of gradients, or of their parameters, that an op deals with; None for other ops."""
    return _KIND_OF.get(op)


def kind_of_task(task: Task) -> GradientKind:
    """Return the kind of gradients, or of their parameters, that a task deals with; it must deal with one."""
    kind = kind_of(task.op)
    assert kind is not None, task
    return kind


def summed(op: str) -> KindName | None:
    """Return the name of the kind of gradients that an op sums, whoever keeps the sum; None = of none."""
    return _SUMMED.get(op)


def _reduction(task: Task, sizes: Sizes) -> Work:
    return Work(collective="all_reduce", sent_bytes=sizes.reduced_bytes(task))


register(
    *(
        OpSpec(
            name=kind.reduce,
            family=Family.GRADIENTS,
            title=f"all-reduce of {kind.what}",
            kind=Kind.COLLECTIVE,
            work=_reduction,
            backward=Backward.NONE,
            indices="p",
        )
        for kind in GRADIENT_KINDS.values()
    )
)
