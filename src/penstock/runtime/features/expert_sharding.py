"""Handlers of expert sharding: rows gathered for all shards of an expert, dealt, summed and kept.

Rows are a tuple with one tensor per slice. Shapes: K slices of a chunk, S ranks that share every expert, P
ranks of the expert group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from penstock.device import Gpu, Stream, device_of, on_device
from penstock.graph import Phase, Task
from penstock.moe.hooks import scaled_by
from penstock.ops import Op
from penstock.routing.routes import ShardPlace, Shares
from penstock.runtime.handlers import Inputs, Outputs, StepContext, handles
from penstock.runtime.ops import held, joined, routes_of, to_ranks, to_slices

F, B = Phase.FORWARD, Phase.BACKWARD
Slices = tuple[Tensor, ...]
Move = Callable[[StepContext, Task, Slices, Sequence[Shares]], Slices]


def _moved(role: str, move: Move, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return rows: after a move of those that are read by this role."""
    shares = routes_of(inputs).shares[task.cut.first : task.cut.stop]
    return {"rows": move(context, task, held(inputs.one(role), task.cut), shares)}


def _moves(op: str, forward: Move, backward: Move) -> None:
    """Register handlers of an op that moves rows."""
    handles(op, F)(partial(_moved, "rows", forward))
    handles(op, B)(partial(_moved, "d_rows", backward))


# ---- FSMoE: after the all-to-all ---------------------------------------------------------------------------


def gather_peers(context: StepContext, task: Task, rows: Slices, shares: Sequence[Shares]) -> Slices:
    """Gather the rows that came to all shards, shard by shard."""
    sizes = [each.peers for each in shares]
    found = context.transport(task).all_gather(joined(rows), _totals(sizes), task.axes)
    return to_slices(found, sizes)


def scatter_peers(context: StepContext, task: Task, rows: Slices, shares: Sequence[Shares]) -> Slices:
    """Return the sum of all shards' partial rows, to each shard the rows that came to it."""
    sizes, place = [each.peers for each in shares], _place(context, task).rank
    sent = to_ranks(rows, sizes)
    mine = context.transport(task).reduce_scatter(sent, _totals(sizes), task.axes)
    return tuple(mine.split([each[place] for each in sizes]))


# ---- DeepSpeed-MoE: before the all-to-all ------------------------------------------------------------------


def gather_blocks(context: StepContext, task: Task, rows: Slices, shares: Sequence[Shares]) -> Slices:
    """Gather the rows of all shards, by target rank and inside it by shard."""
    sizes = [[sum(blocks) for blocks in each.blocks] for each in shares]
    found = context.transport(task).all_gather(joined(rows), _totals(sizes), task.axes)
    by_target = []
    for rows_RM, share in zip(to_slices(found, sizes), shares, strict=True):
        count, targets = len(share.blocks), len(share.blocks[0])
        blocks = rows_RM.split([size for of_shard in share.blocks for size in of_shard])
        order = [s * targets + t for t in range(targets) for s in range(count)]
        by_target.append(torch.cat([blocks[block] for block in order]))
    return tuple(by_target)


def scatter_blocks(context: StepContext, task: Task, rows: Slices, shares: Sequence[Shares]) -> Slices:
    """Return the sum of all shards' gradients of rows, to each shard its own."""
    place = _place(context, task).rank
    sizes = [[sum(blocks) for blocks in each.blocks] for each in shares]
    by_shard = [_by_shard(each, share) for each, share in zip(rows, shares, strict=True)]
    sent = to_ranks(by_shard, sizes)
    mine = context.transport(task).reduce_scatter(sent, _totals(sizes), task.axes)
    return tuple(mine.split([each[place] for each in sizes]))


def keep_blocks(context: StepContext, task: Task, rows: Slices, shares: Sequence[Shares]) -> Slices:
    """Return this rank's rows among those of all shards."""
    place = _place(context, task).rank
    return tuple(
        _by_shard(each, share).split([sum(blocks) for blocks in share.blocks])[place].contiguous()
        for each, share in zip(rows, shares, strict=True)
    )


def reduce_rows(context: StepContext, task: Task, rows: Slices, shares: Sequence[Shares]) -> Slices:
    """Return the sum of all shards' partial rows, to all of them."""
    del shares
    total = torch.cat(rows)  # a copy: what experts left may be needed by their backward
    context.transport(task).all_reduce(total, task.axes)
    return tuple(total.split([len(each) for each in rows]))


def unchanged(context: StepContext, task: Task, rows: Slices, shares: Sequence[Shares]) -> Slices:
    """Return rows unchanged: their gradients are the same on all shards."""
    del context, task, shares
    return rows


def repeated(factor: Callable[[StepContext], float], move: Move) -> Move:
    """Return a move of gradients that scales them.

    Ranks that share attention bring the same rows, so experts see each row that many times: only with a share
    of every gradient do they learn from it once. On the way back to their rank gradients are made whole
    again.
    """

    def scaled(context: StepContext, task: Task, rows: Slices, shares: Sequence[Shares]) -> Slices:
        moe, by = context.layers[task.layer].experts, factor(context)
        return tuple(scaled_by(moe.hooks, each, by) for each in move(context, task, rows, shares))

    return scaled


# ---- Parm's S2: the same rows on several ranks -------------------------------------------------------------


def deal(context: StepContext, task: Task, rows: Slices, shares: Sequence[Shares]) -> Slices:
    """Return every n-th row of each expert: this rank's share."""
    dealt, turn = _place(context, task).dealt, context.tensor.rank
    pairs = zip(rows, shares, strict=True)
    return tuple(each[_turn(share.counts, turn, dealt, each.device)] for each, share in pairs)


def gather_dealt(context: StepContext, task: Task, rows: Slices, shares: Sequence[Shares]) -> Slices:
    """Gather all ranks' shares, each row where it was before it was dealt."""
    dealt, device = _place(context, task).dealt, rows[0].device
    places = [[_turn(share.counts, turn, dealt, device) for turn in range(dealt)] for share in shares]
    sizes = [[len(place) for place in each] for each in places]
    found = context.transport(task).all_gather(joined(rows), _totals(sizes), task.axes)
    by_turn = to_slices(found, sizes)
    return tuple(
        torch.empty_like(each).index_copy_(0, torch.cat(place), each)
        for each, place in zip(by_turn, places, strict=True)
    )


def _turn(counts: tuple[int, ...], turn: int, dealt: int, device: torch.device) -> Tensor:
    """Return the rows that are dealt in one turn. counts: rows of every expert."""
    here = device_of(device)
    # Another stream might read the numbers before this one has copied them, or after it has freed them.
    return _turn_in(
        here.current_stream(device) if isinstance(here, Gpu) else None, counts, turn, dealt, device
    )


@lru_cache(maxsize=256)  # with fixed slots counts are always the same
def _turn_in(
    stream: Stream | None, counts: tuple[int, ...], turn: int, dealt: int, device: torch.device
) -> Tensor:
    del stream
    ends = np.cumsum(counts)
    starts = ends - np.asarray(counts)
    found = np.concatenate([np.arange(s + turn, e, dealt) for s, e in zip(starts, ends, strict=True)])
    return on_device(found, device)


# ---- helpers -----------------------------------------------------------------------------------------------


def _by_shard(rows: Tensor, share: Shares) -> Tensor:
    """Return rows in the order [shard][target]: as they were before `gather_blocks`."""
    shards, targets = len(share.blocks), len(share.blocks[0])
    blocks = rows.split([share.blocks[s][t] for t in range(targets) for s in range(shards)])
    return torch.cat([blocks[t * shards + s] for s in range(shards) for t in range(targets)])


def _totals(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the sizes of every rank, summed over all slices."""
    return [sum(column) for column in zip(*sizes, strict=True)]


def _place(context: StepContext, task: Task) -> ShardPlace:
    shards = context.maker(task.layer).shards
    assert shards is not None, task
    return shards


_moves(Op.SHARD_GATHER, gather_peers, scatter_peers)
_moves(Op.SHARD_SCATTER, scatter_peers, gather_peers)
_moves(Op.ROWS_GATHER, gather_blocks, repeated(lambda context: context.tensor.size, scatter_blocks))
_moves(Op.ROWS_REDUCE, reduce_rows, unchanged)
_moves(Op.ROWS_KEEP, keep_blocks, repeated(lambda context: 1 / context.tensor.size, gather_blocks))
_moves(Op.DEAL_SLOTS, deal, gather_dealt)
_moves(Op.GATHER_SLOTS, gather_dealt, deal)
