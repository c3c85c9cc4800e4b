"""Ops of expert sharding: ranks of a node share every expert, each a part of its hidden width.

A row must meet all shards of its expert, and their outputs are partial sums. FSMoE gathers rows inside the
node (`XG`, `XS`); Parm sends each row to every shard at once (D and C along both axes); DeepSpeed-MoE gathers
rows before they leave (`BG`, `BR`, `BS`). Parm's S2 first deals the rows of ranks that have the same tokens
(`SD`), and gathers the outputs after combine (`SG`).
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.graph.task import Task
from penstock.ops.base import Family, Kind, OpSpec
from penstock.ops.names import Op
from penstock.ops.work import Collective, Sizes, Work, WorkOf


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

MOVES = (
    *(Op.SHARD_GATHER, Op.SHARD_SCATTER, Op.DEAL_SLOTS, Op.GATHER_SLOTS),
    *(Op.ROWS_GATHER, Op.ROWS_REDUCE, Op.ROWS_KEEP),
)
"""Every op of expert sharding: they move rows, in addition to the legs of a dispatch."""
