"""Ops of expert sharding: ranks of a node share every expert, each a part of its hidden width.

A row must meet all shards of its expert, and their outputs are partial sums. FSMoE gathers rows inside the
node (`XG`, `XS`); Parm sends each row to every shard at once (D and C along both axes); DeepSpeed-MoE gathers
rows before they leave (`BG`, `BR`, `BS`). Parm's S2 first deals the rows of ranks that have the same tokens
(`SD`), and gathers the outputs after combine (`SG`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.apportion import Counts
from penstock.features.routed import Routed, RoutedStep
from penstock.graph.task import Task
from penstock.ops.base import Family, Kind, OpSpec
from penstock.ops.names import Op
from penstock.ops.work import Collective, Sizes, Work, WorkOf
from penstock.routing.routes import in_turn


def _over(ranks_of: Callable[[Sizes], int], forward: Collective, backward: Collective) -> WorkOf:
    """Return the work of a collective on all meeting ranks' rows, by phase; "" = rows are only copied."""

    def work(task: Task, sizes: Sizes) -> Work:
        rows_bytes = sizes.wire_bytes(sizes.rows(task))
        collective = forward if task.forward else backward
        if not collective:
            return Work(copied_bytes=rows_bytes)
        return Work(collective=collective, sent_bytes=rows_bytes * ranks_of(sizes), follows_rows=True)

    return work


def _over_shards(forward: Collective, backward: Collective) -> WorkOf:
    """Return the work of a collective over the shards of an expert."""
    return _over(lambda sizes: sizes.etp_size, forward, backward)


def _over_tokens(forward: Collective, backward: Collective) -> WorkOf:
    """Return the work of a collective over ranks with the same tokens."""
    return _over(lambda sizes: sizes.tp_size, forward, backward)


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
    _spec(Op.SHARD_GATHER, "rows to all shards", _over_shards(GATHER, SCATTER), Op.SHARD_SCATTER),
    _spec(Op.SHARD_SCATTER, "sums of all shards' outputs", _over_shards(SCATTER, GATHER), Op.SHARD_GATHER),
    _spec(Op.DEAL_SLOTS, "this rank's share of equal rows", _over_tokens("", GATHER), Op.GATHER_SLOTS),
    _spec(Op.GATHER_SLOTS, "outputs of all ranks' shares", _over_tokens(GATHER, ""), Op.DEAL_SLOTS),
    _spec(Op.ROWS_GATHER, "rows of all sharing ranks", _over_shards(GATHER, SCATTER), Op.SHARD_SCATTER),
    _spec(Op.ROWS_REDUCE, "sums of outputs, to all", _over_shards("all_reduce", ""), Op.ROWS_REDUCE),
    _spec(Op.ROWS_KEEP, "this rank's rows", _over_shards("", GATHER), Op.ROWS_GATHER),
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
