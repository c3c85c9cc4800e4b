"""Ops that move whole samples between ranks: NetMoE's placement of samples, layer by layer.

A combine can deliver a sample's rows to any rank. So ranks tell each other what every sample sends to which
position (`SC`, `SN`), each works out the same new homes on the host (`SP`), and they compare what they found
(`SH`). Expert outputs are put in the order of the new homes (`RO`) and combine takes them there; values that
do not pass the experts follow in a transfer of their own (`SM`).

Where it can, the residual stream passes the experts: rows leave with it in place of its norm, and with the
weight of their choice, and come home with outputs weighted and the residual added
(`penstock.moe.expert_slots`).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph.task import Task
from penstock.mesh import Group
from penstock.ops.base import Backward, Kind, OpSpec
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work, compared

PACKED_COLUMNS = 2
"""Numbers in a row beside the residual stream: a weight, and whether the residual is added there."""
COUNT_BYTES = 4
TABLE_BYTES, FACT_BYTES = 8, 8
SOLVER_PASSES = 100


def _counting(task: Task, sizes: Sizes) -> Work:
    """Return the work of the next layer's gate on this layer's tokens."""
    return Work(flops=sizes.router_flops(sizes.tokens(task)))


def _exchange(task: Task, sizes: Sizes) -> Work:
    """Return the work of sending every sample's rows by expert, here and in the next layer, to all ranks."""
    mine_bytes = sizes.samples(task) * 2 * sizes.num_experts * COUNT_BYTES
    return Work(collective="all_gather", sent_bytes=mine_bytes * sizes.members(task))


def _solving(task: Task, sizes: Sizes) -> Work:
    """Return the work of SOLVER_PASSES passes over the table of all samples, at this machine's copying speed.

    Measured: 1.3 ms for 384 samples of 16 ranks and 16 experts, 150 ms for 4,096 samples of 128.
    """
    samples = sizes.samples(task) * sizes.members(replace(task, axes=Group.EXPERT))
    return Work(copied_bytes=SOLVER_PASSES * samples * 2 * sizes.num_experts * TABLE_BYTES)


def _moving(task: Task, sizes: Sizes) -> Work:
    """Return the work at most: all samples leave, with their residual, or with facts where rows bring it."""
    tokens = sizes.tokens(task)
    beside_bytes = FACT_BYTES * (sizes.top_k + 1) * tokens
    sent_bytes = beside_bytes if sizes.packed_residual else sizes.hidden_bytes(tokens)
    return Work(collective="all_to_all", sent_bytes=sent_bytes)


def _ordering(task: Task, sizes: Sizes) -> Work:
    copied_bytes = 2 * sizes.wire_bytes(sizes.rows(task))
    return Work(copied_bytes=copied_bytes, pieces=len(task.cut.held), follows_rows=True)


OPS = (
    OpSpec(
        name=Op.SAMPLE_COUNTS,
        turn="gated",
        title="rows of every sample by expert, here and expected in the next layer",
        kind=Kind.COMPUTE,
        work=_counting,
        backward=Backward.NONE,
    ),
    OpSpec(
        name=Op.SAMPLE_LOADS,
        turn="routed",
        title="exchange of rows per sample and expert",
        kind=Kind.COLLECTIVE,
        work=_exchange,
        backward=Backward.NONE,
    ),
    OpSpec(
        name=Op.SAMPLE_PLACES,
        title="new homes of all samples",
        kind=Kind.HOST,
        work=_solving,
        backward=Backward.NONE,
    ),
    OpSpec(
        name=Op.SAMPLE_HOMES,
        title="comparison of the new homes",
        kind=Kind.COLLECTIVE,
        work=compared,
        backward=Backward.NONE,
    ),
    OpSpec(
        name=Op.SAMPLE_MOVE,
        title="what of samples is not in their rows, to their new homes",
        kind=Kind.COLLECTIVE,
        work=_moving,
        transpose=Op.SAMPLE_MOVE,
        given=frozenset({"positions", "homes", "metadata"}),
    ),
    OpSpec(
        name=Op.ROW_ORDER,
        turn="computed",
        title="expert outputs in the order of new homes",
        kind=Kind.COPY,
        work=_ordering,
        given=frozenset({"homes"}),
        indices="mc",
    ),
)
