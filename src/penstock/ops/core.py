"""The core's ops: a block's computation, sums of gradients, and transfers of rows to experts and home."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from penstock.graph.task import Lane, Name, Phase, Task
from penstock.mesh import Axes, Group
from penstock.ops.base import OPS, Backward, Family, Kind, Op, OpSpec, register, spec_of
from penstock.ops.work import Sizes, Work

# ---- computation: all tasks between two transfers ---------------------------------------------------------

CARRYING_PASSES = 7
"""Times that experts read or write rows with the residual stream, beyond those without: columns split off,
their norm, outputs times weights, the sum."""
REPLICATED = "gradients of L{layer}"
PARTIAL = "partial gradients of L{layer}"
EXPERTS = "expert gradients of L{layer}"
"""State: the gradients of a layer's replicated parameters; those among them to which every rank that shares
attention adds its part; and the gradients of its experts."""


def _copied(task: Task, sizes: Sizes) -> float:
    """Return the bytes copied to permute rows, or to un-permute them."""
    return sizes.hidden_bytes(2 * sizes.tokens(task) * sizes.top_k)


def coded(task: Task, sizes: Sizes) -> float:
    """Return the bytes copied to encode rows for their transfer, or to decode them."""
    return sizes.coding_bytes(sizes.tokens(task) * sizes.top_k)


def _copies(task: Task, sizes: Sizes) -> Work:
    return Work(copied_bytes=_copied(task, sizes), kernels=sizes.kernels(sizes.tokens(task), "hidden"))


def _attention(task: Task, sizes: Sizes) -> Work:
    tokens = sizes.tokens(task)
    dense = 0.0 if sizes.moe_layers[task.layer] else sizes.dense_flops(tokens)
    coded_bytes = 0.0 if dense else coded(task, sizes)
    return Work(
        flops=sizes.attention_flops(tokens) + dense,
        copied_bytes=_copied(task, sizes) + coded_bytes,
        kernels=sizes.kernels(tokens, "attention", "dense" if dense else "router", beside_bytes=coded_bytes),
    )


def _unpermuted(task: Task, sizes: Sizes) -> Work:
    coded_bytes = coded(task, sizes)
    kernels = sizes.kernels(sizes.tokens(task), "home", beside_bytes=coded_bytes)
    return Work(copied_bytes=_copied(task, sizes) + coded_bytes, kernels=kernels)


def _shared(task: Task, sizes: Sizes) -> Work:
    tokens = sizes.tokens(task)
    copied_bytes = sizes.hidden_bytes(2 * tokens)
    return Work(
        flops=sizes.shared_flops(tokens), copied_bytes=copied_bytes, kernels=sizes.kernels(tokens, "shared")
    )


def _experts(task: Task, sizes: Sizes) -> Work:
    """Return the work of a shard: it computes its part of the hidden width of every row."""
    rows = sizes.rows(task) * task.cut.row_copies
    carried_bytes = CARRYING_PASSES * sizes.packed_residual * sizes.hidden_bytes(rows)
    beside_bytes = carried_bytes + 2 * sizes.coding_bytes(rows)
    return Work(
        flops=sizes.expert_flops(rows) / sizes.etp_size,
        copied_bytes=2 * sizes.hidden_bytes(rows) + beside_bytes,
        pieces=len(task.cut.held),
        follows_rows=True,
        kernels=sizes.kernels(rows, "experts", shares=sizes.etp_size, beside_bytes=beside_bytes),
    )


def _head(task: Task, sizes: Sizes) -> Work:
    tokens = sizes.tokens(task)
    copied_bytes = sizes.hidden_bytes(tokens)
    return Work(
        flops=sizes.head_flops(tokens),
        copied_bytes=copied_bytes,
        kernels=sizes.kernels(tokens, "head", "loss"),
    )


_computed = partial(OpSpec, kind=Kind.COMPUTE, gradients=REPLICATED)

register(
    _computed(
        name=Op.EMBED,
        place="input",
        launches=4,
        title="token embedding",
        work=_copies,
    ),
    _computed(
        name=Op.ATTENTION,
        turn="gated",
        family=Family.ATTENTION,
        launches=82,
        title="attention, router, permute (a dense block: all of it)",
        work=_attention,
        given=frozenset({"metadata"}),
        recomputable=True,
    ),
    _computed(
        name=Op.SHARED,
        place="beside",
        family=Family.EXPERTS,
        title="shared experts",
        work=_shared,
        recomputable=True,
    ),
    _computed(
        name=Op.EXPERTS,
        turn="computed",
        family=Family.EXPERTS,
        launches=16,
        title="expert computation",
        work=_experts,
        given=frozenset({"route", "replicas"}),
        indices="mc",
        gradients=EXPERTS,
        recomputable=True,
    ),
    _computed(
        name=Op.UNPERMUTE,
        place="after",
        launches=6,
        title="unpermute, gate weights, residual",
        work=_unpermuted,
        given=frozenset({"order", "metadata"}),
    ),
    _computed(
        name=Op.HEAD,
        place="output",
        launches=8,
        title="final norm, output head, loss",
        work=_head,
        given=frozenset({"metadata"}),
    ),
)


def computes_experts(op: str) -> bool:
    """Return whether tasks of an op compute routed experts: what they take follows the rows that come."""
    return op in OPS and OPS[op].gradients == EXPERTS


# ---- kinds of gradients, one row each: their state, the ranks that sum them, and the op of every step -----
#
# Whole sums are left on every rank by `reduce`. Where the optimiser is sharded, `scatter` leaves every rank
# its share of the sum, `update` changes that share of the parameters, and `gather` brings the shares
# together.

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


# ---- transfers of rows, and the exchange that says how many rows there are --------------------------------

COMBINE_OF = {
    Op.DISPATCH_GATHER: Op.COMBINE_SCATTER,
    Op.DISPATCH: Op.COMBINE,
    Op.DISPATCH_SCATTER: Op.COMBINE_GATHER,
}
"""By leg of a dispatch, the leg of combine that takes the same way home: its transpose."""
DISPATCH_OF = {home: out for out, home in COMBINE_OF.items()}
"""By leg of combine, the leg of a dispatch that takes the same way out."""
TRANSFERS = (*COMBINE_OF, *DISPATCH_OF)
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
        return Hop(COMBINE_OF[self.op], self.axes, self.lane)


FLAT = (Hop(Op.DISPATCH, Group.EXPERT, Lane.INTER),)
"""A dispatch of one leg: every rank sends its rows directly to every other rank."""

COUNT_BYTES = 8


def _counts(task: Task, sizes: Sizes) -> Work:
    return Work(collective="all_to_all", sent_bytes=sizes.num_experts * task.cut.slices * COUNT_BYTES)


def _leg(task: Task, sizes: Sizes) -> Work:
    rows = sizes.rows(task) * task.cut.row_copies
    sent_bytes = sizes.leg_bytes(rows, outward=task.op in COMBINE_OF, between=between_nodes(task.op))
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
            turn="routed" if op in COMBINE_OF else None,
            family=Family.ROWS,
            title=title,
            kind=Kind.COLLECTIVE,
            work=_leg,
            transpose={**COMBINE_OF, **DISPATCH_OF}[op],
            given=frozenset({"route"}),
            indices="mc",
        )
        for op, title in _TITLES.items()
    ),
)


def outward(op: str) -> str:
    """Return the op of dispatch that takes the same leg as `op`, towards the experts."""
    return DISPATCH_OF.get(op, op)


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
