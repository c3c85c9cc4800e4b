"""Ops that move rows to their experts and back home, and the exchange that says how many rows there are."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph.task import Lane, Task
from penstock.mesh import Axes, Group
from penstock.ops.base import Backward, Family, Kind, OpSpec, register
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work

HOME = {
    Op.DISPATCH_GATHER: Op.COMBINE_SCATTER,
    Op.DISPATCH: Op.COMBINE,
    Op.DISPATCH_SCATTER: Op.COMBINE_GATHER,
}
"""By leg of a dispatch, the leg of combine that takes the same way home: its transpose."""
AWAY = {home: out for out, home in HOME.items()}
"""By leg of combine, the leg of a dispatch that takes the same way out."""
TRANSFERS = (*HOME, *AWAY)
"""Every op that moves rows."""


@dataclass(frozen=True)
class Hop:
    """One leg of a dispatch as a task: its op, its lane, and the axes along which it meets other ranks."""

    op: str
    axes: Axes
    lane: Lane = Lane.INTRA

    @property
    def home(self) -> Hop:
        """The leg of combine that takes the same way."""
        return Hop(HOME[self.op], self.axes, self.lane)


FLAT = (Hop(Op.DISPATCH, Group.EXPERT, Lane.INTER),)
"""A dispatch of one leg: every rank sends its rows directly to every other rank."""

COUNT_BYTES = 8


def _counts(task: Task, sizes: Sizes) -> Work:
    return Work(collective="all_to_all", sent_bytes=sizes.num_experts * task.cut.slices * COUNT_BYTES)


def _leg(task: Task, sizes: Sizes) -> Work:
    rows = sizes.rows(task) * task.cut.row_copies
    sent_bytes = sizes.leg_bytes(rows, outward=task.op in HOME, between=between_nodes(task.op))
    return Work(collective="leg", sent_bytes=sent_bytes, follows_rows=True)


_TITLES = {
    Op.DISPATCH_GATHER: "dispatch inside the node, on the way out",
    Op.DISPATCH: "tokens to their experts",
    Op.DISPATCH_SCATTER: "dispatch inside the node, on arrival",
    Op.COMBINE_GATHER: "combine inside the node, on the way out",
    Op.COMBINE: "expert outputs back home",
    Op.COMBINE_SCATTER: "combine inside the node, on arrival",
}

register(
    OpSpec(
        name=Op.COUNTS,
        turn="routed",
        sizes_transfers=True,
        launches=4,
        title="exchange of tokens per expert",
        kind=Kind.COLLECTIVE,
        work=_counts,
        backward=Backward.NONE,
    ),
    *(
        OpSpec(
            name=op,
            turn="routed" if op in HOME else None,
            family=Family.ROWS,
            title=title,
            kind=Kind.COLLECTIVE,
            work=_leg,
            transpose={**HOME, **AWAY}[op],
            given=frozenset({"route"}),
            indices="mc",
        )
        for op, title in _TITLES.items()
    ),
)


def outward(op: str) -> str:
    """Return the op of dispatch that takes the same leg as `op`, towards the experts."""
    return AWAY.get(op, op)


def between_nodes(op: str) -> bool:
    """Return whether an op is the leg between nodes, out or home."""
    return outward(op) == Op.DISPATCH
