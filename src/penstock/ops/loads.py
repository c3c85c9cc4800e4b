"""The op by which ranks tell each other how many of their tokens went to each expert."""

from __future__ import annotations

from penstock.graph.task import Task
from penstock.ops.base import Backward, Kind, OpSpec, register
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work

LOAD_BYTES = 4


def _loads(task: Task, sizes: Sizes) -> Work:
    table_bytes = sum(sizes.moe_layers) * sizes.num_experts * LOAD_BYTES
    return Work(collective="all_gather", sent_bytes=sizes.members(task) * table_bytes)


register(
    OpSpec(
        name=Op.LOADS,
        title="loads of experts, gathered from all ranks",
        kind=Kind.COLLECTIVE,
        work=_loads,
        backward=Backward.NONE,
        indices="",
    )
)
