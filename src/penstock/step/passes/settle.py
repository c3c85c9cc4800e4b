"""Program order: what rules and searches break ties by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.graph import Graph, Phase, Task
from penstock.ops.names import Op
from penstock.step.stages import Stage

GATED = {Op.ATTENTION, Op.GATE, Op.SAMPLE_COUNTS}
"""Forward, what a microbatch's samples send is counted as soon as that is known: all ranks wait for it."""

ROUTED = {
    Op.COUNTS,
    Op.SAMPLE_LOADS,
    Op.DEAL_SLOTS,
    Op.ROWS_GATHER,
    Op.DISPATCH_GATHER,
    Op.DISPATCH,
    Op.DISPATCH_SCATTER,
    Op.SHARD_GATHER,
}
"""Forward, a microbatch goes through all of these before the next one does: its experts wait for it."""

COMPUTED = {Op.EXPERTS, Op.ROW_ORDER}
"""A chunk goes through these before the next one does: it leaves while the next is computed."""


@dataclass(frozen=True)
class Settle:
    """Breadth first as FlowMoE (Eq. 2-5) orders it: an op for all its pieces, then the next op.

    Backward the last microbatch goes first. Shared experts stand before the routed ones, in both halves: they
    are what there is to compute while rows are under way.
    """

    name = "settle"
    stage = Stage.SETTLE

    def __call__(self, graph: Graph) -> Graph:
        blocks = [list(block) for _, block in groupby(graph.tasks, _block)]
        return Graph.of(task for block in _shared_first(blocks) for task in sorted(block, key=_place(block)))


def _block(task: Task) -> tuple[object, ...]:
    """Tasks that stand together: the pieces of one op, or of several that a microbatch goes through."""
    layer, op, phase, *_ = task.name
    if op in COMPUTED:
        return layer, "computed", task.forward
    if phase is Phase.FORWARD:
        op = "routed" if op in ROUTED else "gated" if op in GATED else op
    return layer, op, phase


def _place(block: Sequence[Task]) -> Callable[[Task], tuple[int, ...]]:
    """Microbatches in their turn, inside them what the block has, in its order."""
    turn = {op: i for i, op in enumerate(dict.fromkeys(task.op for task in block))}
    by_chunk = block[0].op in COMPUTED

    def place(task: Task) -> tuple[int, ...]:
        _, op, phase, microbatch, chunk, piece = task.name
        m = microbatch or 0
        inside = (chunk or 0, turn[op]) if by_chunk else (turn[op], chunk or 0)
        return (m if phase is Phase.FORWARD else -m), *inside, piece or 0

    return place


def _shared_first(blocks: Sequence[list[Task]]) -> Iterator[list[Task]]:
    """Blocks in order, those of shared experts before the experts of their layer and half."""
    shared: dict[tuple[int, bool], list[list[Task]]] = {}
    for block in blocks:
        if block[0].op == Op.SHARED:
            shared.setdefault((block[0].layer, block[0].forward), []).append(block)
    for block in blocks:
        first = block[0]
        if first.op == Op.SHARED:
            continue
        if any(task.op == Op.EXPERTS for task in block):
            yield from shared.pop((first.layer, first.forward), ())
        yield block
