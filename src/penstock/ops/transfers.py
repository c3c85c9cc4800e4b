"""Ops that move rows to their experts and back home, and the exchange that says how many rows there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.graph.task import Lane, Name, Phase, Task
from penstock.mesh import Axes, Group
from penstock.ops.base import Backward, Family, Kind, OpSpec, register, spec_of
from penstock.ops.blocks import computes_experts
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


# ---- ops by which all ranks learn numbers of the whole step: loss, statistics, and loads of experts -------


STATISTICS_BYTES = 8
LOAD_BYTES = 4


def _statistics(task: Task, sizes: Sizes) -> Work:
    del task
    size = sum(sizes.moe_layers) * 2 * (1 + sizes.num_experts) * STATISTICS_BYTES
    return Work(collective="all_reduce", sent_bytes=size)


def _loads(task: Task, sizes: Sizes) -> Work:
    table_bytes = sum(sizes.moe_layers) * sizes.num_experts * LOAD_BYTES
    return Work(collective="all_gather", sent_bytes=sizes.members(task) * table_bytes)


register(
    OpSpec(
        name=Op.STATISTICS,
        once=True,
        launches=80,
        title="sums of loss, tokens and balance statistics",
        kind=Kind.COLLECTIVE,
        work=_statistics,
        backward=Backward.VALUE,
        indices="",
    ),
    OpSpec(
        name=Op.LOADS,
        once=True,
        title="loads of experts, gathered from all ranks",
        kind=Kind.COLLECTIVE,
        work=_loads,
        backward=Backward.NONE,
        indices="",
    ),
)

# ---- the legs of rows, out and home -----------------------------------------------------------------------


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


# ---- the way of rows through a step: out to their experts and home ----------------------------------------


ROWS = ("rows", "d_rows")
"""Roles under which rows are read in the forward half, and their gradients in the backward half."""


def journeys(tasks: Iterable[Task]) -> Iterator[tuple[Task, ...]]:
    """Yield for every computation of experts the tasks that its rows pass.

    Where experts read several pieces, or several tasks read theirs, each piece is in one journey or more.

    These are the legs of dispatch, the experts, and the legs of combine, in this order; in the backward half,
    those of combine come first.

    Args:
        tasks: The tasks of one step; a task that is missing ends a journey.
    """
    by_name = {task.name: task for task in tasks}
    after: dict[Name, list[Task]] = {name: [] for name in by_name}
    before: dict[Name, list[Task]] = {}
    for name, task in by_name.items():
        read = (source for role in ROWS for source in task.inputs.get(role, ()))
        before[name] = [by_name[source] for source in read if source in by_name]
        for source in before[name]:
            after[source.name].append(task)
    for task in by_name.values():
        if computes_experts(task.op) and task.phase is not Phase.WEIGHT:
            there, home = list(_ways(task, before)), list(_ways(task, after))
            for number in range(max(len(there), len(home))):
                way = reversed(there[number % len(there)])
                yield (*way, task, *home[number % len(home)])


def _ways(task: Task, beyond: Mapping[Name, Sequence[Task]]) -> Iterator[tuple[Task, ...]]:
    """Yield every way from a task through the transfers next to it; an empty way where there is none."""
    near = beyond[task.name]
    legs = [leg for leg in near if spec_of(leg.op).kind in (Kind.COLLECTIVE, Kind.COPY)]
    if not legs:
        yield ()
    for leg in legs:
        for way in _ways(leg, beyond):
            yield (leg, *way)
