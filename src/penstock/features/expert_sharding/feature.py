"""Ops of expert sharding: ranks of a node share every expert, each a part of its hidden width.

A row must meet all shards of its expert, and their outputs are partial sums. FSMoE gathers rows inside the
node (`XG`, `XS`); Parm sends each row to every shard at once (D and C along both axes); DeepSpeed-MoE gathers
rows before they leave (`BG`, `BR`, `BS`). Parm's S2 first deals the rows of ranks that have the same tokens
(`SD`), and gathers the outputs after combine (`SG`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from penstock.apportion import Counts
from penstock.features.feature import Feature
from penstock.features.field import Asked, Choice, Field
from penstock.features.routed import Routed, RoutedStep
from penstock.graph import Cut, Graph, ScheduleError, Task
from penstock.mesh import Group
from penstock.ops.base import Family, Kind, Op, OpSpec
from penstock.ops.core import TRANSFERS, Hop
from penstock.ops.work import Collective, Sizes, Work, WorkOf
from penstock.routing.routes import in_turn
from penstock.step.rewrite import Beside, Pass, Stage, changed, insert_after, insert_before, split
from penstock.step.shape import ExpertForm, StepShape


def _work(ranks_of: Callable[[Sizes], int], forward: Collective, backward: Collective) -> WorkOf:
    """Return the work of a collective on all meeting ranks' rows, by phase; "" = rows are only copied."""

    def work(task: Task, sizes: Sizes) -> Work:
        rows_bytes = sizes.wire_bytes(sizes.rows(task))
        collective = forward if task.forward else backward
        if not collective:
            return Work(copied_bytes=rows_bytes, follows_rows=True)
        return Work(collective=collective, sent_bytes=rows_bytes * ranks_of(sizes), follows_rows=True)

    return work


_of_shards = partial(_work, lambda sizes: sizes.etp_size)
_of_tokens = partial(_work, lambda sizes: sizes.tp_size)


def _spec(name: str, title: str, work: WorkOf, transpose: str) -> OpSpec:
    return OpSpec(
        name=name,
        turn="routed" if name in (Op.SHARD_GATHER, Op.DEAL_SLOTS, Op.ROWS_GATHER) else None,
        family=Family.ROWS,
        title=title,
        kind=Kind.COLLECTIVE,
        work=work,
        transpose=transpose,
        given=frozenset({"route"}),
        indices="mc",
    )


GATHER: Collective = "all_gather"
SCATTER: Collective = "reduce_scatter"

OPS = (
    _spec(Op.SHARD_GATHER, "rows to all shards", _of_shards(GATHER, SCATTER), Op.SHARD_SCATTER),
    _spec(Op.SHARD_SCATTER, "sums of all shards' outputs", _of_shards(SCATTER, GATHER), Op.SHARD_GATHER),
    _spec(Op.DEAL_SLOTS, "this rank's share of equal rows", _of_tokens("", GATHER), Op.GATHER_SLOTS),
    _spec(Op.GATHER_SLOTS, "outputs of all ranks' shares", _of_tokens(GATHER, ""), Op.DEAL_SLOTS),
    _spec(Op.ROWS_GATHER, "rows of all sharing ranks", _of_shards(GATHER, SCATTER), Op.SHARD_SCATTER),
    _spec(Op.ROWS_REDUCE, "sums of outputs, to all", _of_shards("all_reduce", ""), Op.ROWS_REDUCE),
    _spec(Op.ROWS_KEEP, "this rank's rows", _of_shards("", GATHER), Op.ROWS_GATHER),
)


def _by_shard(sizes_GPH: Counts) -> Counts:
    shards = sizes_GPH.shape[2]
    return np.repeat(sizes_GPH.reshape(-1, shards), shards, axis=0)


def _dealt(step: RoutedStep, task: Task) -> Counts:
    """Return what each of the ranks with the same rows is dealt, [P, W]."""
    shares, rows_PCE = step.sizes.tp_size, step.brought(task)
    return np.stack([in_turn(rows_PCE, i, shares).sum(axis=(1, 2)) for i in range(shares)], axis=1)


def _sent(step: RoutedStep, task: Task) -> Counts:
    """Return what each of the ranks that share a rank's experts sends, [P, W]."""
    return _by_shard(step.table(task).sum(axis=(3, 4)))


def _received(step: RoutedStep, task: Task) -> Counts:
    """Return what came to a rank's experts by way of each of their shards, [P, W]."""
    return _by_shard(step.table(task).sum(axis=(1, 4)).transpose(0, 2, 1))


ROUTED = {
    **dict.fromkeys((Op.DEAL_SLOTS, Op.GATHER_SLOTS), Routed(sizes=_dealt)),
    **dict.fromkeys((Op.ROWS_GATHER, Op.ROWS_KEEP), Routed(sizes=_sent)),
    **dict.fromkeys((Op.SHARD_GATHER, Op.SHARD_SCATTER, Op.ROWS_REDUCE), Routed(sizes=_received)),
}


# ---- how rows meet all shards of their experts: FSMoE's way, Parm's two, and DeepSpeed-MoE's --------------
#
# Every pass begins with a flat dispatch, `AT ─rows─ D ─rows─ X ─rows─ C ─rows─ U`.


BETWEEN = (Op.DISPATCH, Op.COMBINE)


@dataclass(frozen=True)
class GatheredShards:
    """FSMoE: a row crosses nodes once, is gathered inside the node by all shards, whose outputs are summed.

    before  D ─rows─ X ─rows─ C
    after   D ─rows─ XG ─rows─ X ─rows─ XS ─rows─ C          XG, XS intra

    Attributes:
        shards: The shards of every expert.
    """

    shards: int
    name = "gathered_shards"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        graph = _copied(graph, (Op.EXPERTS,), self.shards)
        graph = insert_before(graph, Op.EXPERTS, "rows", Beside(Hop(Op.SHARD_GATHER, Group.SHARDS)).before)
        graph = insert_after(graph, Op.EXPERTS, "rows", Beside(Hop(Op.SHARD_SCATTER, Group.SHARDS)).after)
        return _counts_known_to_all(graph)


@dataclass(frozen=True)
class FusedShards:
    """Parm: one all-to-all brings a row to every shard of its expert; partial outputs are summed at home.

    D and C meet ranks along both axes, (ep, etp).

    Attributes:
        shards: The shards of every expert.
    """

    shards: int
    name = "fused_shards"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        _refuse_legs(graph, self.name)
        fused = changed(graph, BETWEEN, _over_shards)
        return _counts_known_to_all(_copied(fused, (*BETWEEN, Op.EXPERTS), self.shards))


@dataclass(frozen=True)
class DealtSlots:
    """Parm's S2: ranks that share attention have the same rows, and each sends its share of every expert's.

    before  AT ─rows─ D ... C ─rows─ U
    after   AT ─rows─ SD ─rows─ D ... C ─rows─ SG ─rows─ U          SD, SG intra

    Attributes:
        ranks: The ranks that share attention.
    """

    ranks: int
    name = "dealt_slots"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        _refuse_legs(graph, self.name)
        graph = insert_before(graph, Op.DISPATCH, "rows", Beside(Hop(Op.DEAL_SLOTS, Group.TENSOR)).before)
        graph = insert_after(graph, Op.COMBINE, "rows", Beside(Hop(Op.GATHER_SLOTS, Group.TENSOR)).after)
        shared = (*BETWEEN, Op.DEAL_SLOTS, Op.GATHER_SLOTS, Op.EXPERTS)
        return changed(graph, shared, lambda t: replace(t, cut=replace(t.cut, token_shards=self.ranks)))


@dataclass(frozen=True)
class RepeatedRows:
    """DeepSpeed-MoE: rows are gathered by all shards before they leave, and come home to all of them.

    Ranks that share attention have the same rows, so each row is sent and computed once for each of them:
    this form serves as a baseline.

    before  AT ─rows─ D ... X ─rows─ C ─rows─ U
    after   AT ─rows─ BG ─rows─ D ... X ─rows─ BR ─rows─ C ─rows─ BS ─rows─ U          BG, BR, BS intra

    Attributes:
        shards: The shards of every expert.
    """

    shards: int
    name = "repeated_rows"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        _refuse_legs(graph, self.name)
        graph = _copied(graph, (*BETWEEN, Op.EXPERTS), self.shards)
        graph = insert_before(graph, Op.DISPATCH, "rows", Beside(Hop(Op.ROWS_GATHER, Group.SHARDS)).before)
        graph = insert_after(graph, Op.EXPERTS, "rows", Beside(Hop(Op.ROWS_REDUCE, Group.SHARDS)).after)
        graph = insert_after(graph, Op.COMBINE, "rows", Beside(Hop(Op.ROWS_KEEP, Group.SHARDS)).after)
        return _counts_known_to_all(graph)


def _copied(graph: Graph, ops: Collection[str], shards: int) -> Graph:
    """Return the graph whose tasks of `ops` have the rows of all shards, or send theirs to all of them."""
    return changed(graph, ops, lambda task: replace(task, cut=replace(task.cut, row_copies=shards)))


def _over_shards(task: Task) -> Task:
    return replace(task, axes=Group.EXPERT_SHARDS)


def _counts_known_to_all(graph: Graph) -> Graph:
    """Return the graph whose counts are exchanged over all shards: each must know what others receive."""
    return changed(graph, (Op.COUNTS,), _over_shards)


def _refuse_legs(graph: Graph, name: str) -> None:
    legs = {task.op for task in graph.tasks if task.op in TRANSFERS and task.op not in BETWEEN}
    if legs:
        raise ScheduleError(
            f"{name} sends rows to all shards in one flat all-to-all; a dispatch with legs inside nodes "
            f"({', '.join(sorted(legs))}) goes with expert_form=gather"
        )


PAIRS = {True: (Op.COMBINE, Op.GATHER_SLOTS), False: (Op.DISPATCH, Op.DEAL_SLOTS)}
"""Forward: combine and the gather after it. Backward: dispatch and the gather of gradients after it."""


@dataclass(frozen=True)
class SimultaneousPair:
    """Parm's SAA: while a slice is gathered inside the node, the next one crosses it.

    before  C ─rows─ SG                    D.B ─d_rows─ SD.B
    after   C.c0 ─rows─ SG.c0              D.c0.B ─d_rows─ SD.c0.B
            C.c1 ─rows─ SG.c1              D.c1.B ─d_rows─ SD.c1.B

    All other tasks stay whole.

    Attributes:
        count: The number of slices.
    """

    count: int
    name = "simultaneous_pair"
    stage = Stage.SLICES

    def __call__(self, graph: Graph) -> Graph:
        if any(task.cut.slices > 1 for task in graph.tasks):
            raise ScheduleError("a simultaneous pair is cut where nothing else is: set chunks to 1")
        chunked = {task.layer for task in graph.tasks if task.chunk is not None}

        def pieces(task: Task) -> int:
            if task.chunk is None:
                return 0
            return self.count if task.op in PAIRS[task.forward] else 1

        def cut(task: Task, chunk: int) -> Cut:
            if task.layer not in chunked or task.microbatch is None:
                return task.cut
            length = self.count // max(1, pieces(task))
            first = 0 if task.chunk is None else chunk * length
            stop = self.count if task.chunk is None else first + length
            return replace(task.cut, slices=self.count, first=first, stop=stop)

        return split(graph, "chunk", pieces, cut)


# ---- expert sharding: ranks that share every expert, and the forms in which rows reach all of its shards --


def expert_forms(asked: Asked, dispatches: Sequence[str]) -> tuple[ExpertForm, ...]:
    """Return the forms that differ in this step. All but the first send rows to all shards at once."""
    shared = any(asked.shape.moe_layers) and "flat" in dispatches and not asked.movable.must_move
    return asked.shape.sharing.forms if shared else ("gather",)


def _expert_forms(asked: Asked, choice: Choice) -> Sequence[ExpertForm | None]:
    if asked.shape.sharing.is_none or not any(asked.shape.moe_layers):
        return (None,)
    return expert_forms(asked, (choice.dispatch,))


EXPERT_FORM = Field(
    values=_expert_forms,
    words=lambda d: "" if d.expert_form is None else f"expert form {d.expert_form}",
    head="form",
    cell=lambda d: d.expert_form or "-",
    affects=("cut", "memory"),
    always=False,
    may_be_left_out=True,
)


def _passes(shape: StepShape) -> Sequence[Pass]:
    sharing, form = shape.sharing, shape.expert_form
    if not any(shape.moe_layers) or sharing.is_none:
        return ()
    if form == "baseline":
        return (RepeatedRows(sharing.etp_size),)
    passes: list[Pass] = []
    if form == "s2" and sharing.tp_size > 1:
        passes.append(DealtSlots(sharing.tp_size))
        if shape.pair_slices > 1:
            passes.append(SimultaneousPair(shape.pair_slices))
    if sharing.etp_size > 1:
        shards = GatheredShards if form == "gather" else FusedShards
        passes.append(shards(sharing.etp_size))
    return passes


FEATURE = Feature(
    name="expert_sharding",
    title="cuts the hidden width of every expert over the ranks of a group",
    source="Parm, sections 3 and 4 (N_ESP; schedules S1 and S2); FSMoE; DeepSpeed-MoE",
    ops=OPS,
    passes=_passes,
    fields={"expert_form": EXPERT_FORM},
    routed=ROUTED,
)
