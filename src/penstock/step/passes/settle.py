"""Program order, by which rules and searches break ties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.graph import Graph, Phase, Task
from penstock.ops.names import Op
from penstock.step.stages import Stage

GATED = {Op.ATTENTION, Op.GATE, Op.SAMPLE_COUNTS}
"""In the forward half, a microbatch's rows are counted as soon as they are known: all ranks wait for that."""

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
"""In the forward half, a microbatch passes all of these before the next one: its experts wait for them."""

COMPUTED = {Op.EXPERTS, Op.ROW_ORDER}
"""A chunk passes these before the next one does: it leaves while the next is computed."""


@dataclass(frozen=True)
class Settle:
    """Program order, breadth first as in FlowMoE (Eq. 2-5): an op for all its pieces, then the next op.

    In the backward half the last microbatch goes first. Shared experts stand before the routed ones, in both
    halves: they are what can be computed while rows are in transit.
    """

    name = "settle"
    stage = Stage.SETTLE

    def __call__(self, graph: Graph) -> Graph:
        blocks = [list(block) for _, block in groupby(graph.tasks, _block)]
        return Graph.of(task for block in _shared_first(blocks) for task in sorted(block, key=_place(block)))


def _block(task: Task) -> tuple[object, ...]:
    """Return the key of tasks that stand together: pieces of one op, or of several for a microbatch."""
    layer, op, phase, *_ = task.name
    if op in COMPUTED:
        return layer, "computed", task.forward
    if phase is Phase.FORWARD:
        op = "routed" if op in ROUTED else "gated" if op in GATED else op
    return layer, op, phase


def _place(block: Sequence[Task]) -> Callable[[Task], tuple[int, ...]]:
    """Return the sort key of a block's tasks: by microbatch, then in the block's own order."""
    turn = {op: i for i, op in enumerate(dict.fromkeys(task.op for task in block))}
    by_chunk = block[0].op in COMPUTED

    def place(task: Task) -> tuple[int, ...]:
        _, op, phase, microbatch, chunk, piece = task.name
        m = microbatch or 0
        inside = (chunk or 0, turn[op]) if by_chunk else (turn[op], chunk or 0)
        return (m if phase is Phase.FORWARD else -m), *inside, piece or 0

    return place


def _shared_first(blocks: Sequence[list[Task]]) -> Iterator[list[Task]]:
    """Yield blocks in order, those of shared experts before the experts of their layer and half."""
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
