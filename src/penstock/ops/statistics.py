"""Ops by which all ranks learn numbers of the whole step: loss, statistics, and loads of experts."""

from __future__ import annotations

from penstock.graph.task import Task
from penstock.ops.base import Backward, Kind, OpSpec, register
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work

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
