"""Ops that sum over ranks: the loss and its statistics, and gradients."""

from __future__ import annotations

from penstock.graph.task import Task
from penstock.ops.base import Backward, Kind, OpSpec, register
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work

STATISTICS_BYTES = 8


def _statistics(task: Task, sizes: Sizes) -> Work:
    del task
    size = sum(sizes.moe_layers) * 2 * sizes.num_experts * STATISTICS_BYTES
    return Work(collective="all_reduce", sent_bytes=size)


def _reduction(task: Task, sizes: Sizes) -> Work:
    return Work(collective="all_reduce", sent_bytes=sizes.reduced_bytes(task))


register(
    OpSpec(
        name=Op.STATISTICS,
        title="sums of loss, tokens and balance statistics",
        kind=Kind.COLLECTIVE,
        work=_statistics,
        backward=Backward.VALUE,
        indices="",
    ),
    OpSpec(
        name=Op.ALL_REDUCE,
        title="all-reduce of replicated gradients",
        kind=Kind.COLLECTIVE,
        work=_reduction,
        backward=Backward.NONE,
        indices="p",
    ),
    OpSpec(
        name=Op.EXPERT_ALL_REDUCE,
        title="all-reduce of expert gradients over their replicas",
        kind=Kind.COLLECTIVE,
        work=_reduction,
        backward=Backward.NONE,
        indices="p",
    ),
)
REDUCTIONS = (Op.ALL_REDUCE, Op.EXPERT_ALL_REDUCE)
"""Every op that synchronises gradients."""
