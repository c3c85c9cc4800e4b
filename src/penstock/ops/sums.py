"""Ops that sum over ranks: the loss and its statistics, and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph.task import Task
from penstock.mesh import Axes, Group
from penstock.ops.base import Backward, Family, Kind, OpSpec, register
from penstock.ops.blocks import EXPERTS, PARTIAL, REPLICATED
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work

STATISTICS_BYTES = 8


SCATTERS = {
    Op.SCATTER: Op.ALL_REDUCE,
    Op.PARTIAL_SCATTER: Op.PARTIAL_ALL_REDUCE,
    Op.EXPERT_SCATTER: Op.EXPERT_ALL_REDUCE,
}
"""By the op of which every rank keeps a share of the sum, the op that leaves the whole sum on every rank."""


def reduced(op: str) -> str:
    """Return the op of REDUCTIONS whose gradients an op sums, whoever keeps the sum; "" for all other ops."""
    plain: str = SCATTERS.get(op, op)
    return plain if plain in REDUCTIONS else ""


def _statistics(task: Task, sizes: Sizes) -> Work:
    del task
    size = sum(sizes.moe_layers) * 2 * (1 + sizes.num_experts) * STATISTICS_BYTES
    return Work(collective="all_reduce", sent_bytes=size)


def _reduction(task: Task, sizes: Sizes) -> Work:
    return Work(collective="all_reduce", sent_bytes=sizes.reduced_bytes(task))


register(
    OpSpec(
        name=Op.STATISTICS,
        launches=80,
        title="sums of loss, tokens and balance statistics",
        kind=Kind.COLLECTIVE,
        work=_statistics,
        backward=Backward.VALUE,
        indices="",
    ),
    OpSpec(
        name=Op.ALL_REDUCE,
        family=Family.GRADIENTS,
        title="all-reduce of replicated gradients",
        kind=Kind.COLLECTIVE,
        work=_reduction,
        backward=Backward.NONE,
        indices="p",
    ),
    OpSpec(
        name=Op.PARTIAL_ALL_REDUCE,
        family=Family.GRADIENTS,
        title="all-reduce of gradients that ranks sharing attention have parts of",
        kind=Kind.COLLECTIVE,
        work=_reduction,
        backward=Backward.NONE,
        indices="p",
    ),
    OpSpec(
        name=Op.EXPERT_ALL_REDUCE,
        family=Family.GRADIENTS,
        title="all-reduce of expert gradients over their replicas",
        kind=Kind.COLLECTIVE,
        work=_reduction,
        backward=Backward.NONE,
        indices="p",
    ),
)


@dataclass(frozen=True)
class Reduction:
    """How gradients of one kind are synchronised.

    state: the buffer of the gradients. axes: those of the ranks that sum it. sharing_axes: those where ranks
    share attention.
    """

    state: str
    axes: Axes
    sharing_axes: Axes

    def axes_of(self, *, sharing: bool) -> Axes:
        """Return the axes of the ranks that sum the buffer. sharing: whether ranks share attention."""
        return self.sharing_axes if sharing else self.axes


REDUCTIONS = {
    Op.ALL_REDUCE: Reduction(REPLICATED, Group.WORLD, Group.DATA),
    Op.PARTIAL_ALL_REDUCE: Reduction(PARTIAL, Group.WORLD, Group.WORLD),
    Op.EXPERT_ALL_REDUCE: Reduction(EXPERTS, Group.EXPERT_DATA, Group.EXPERT_DATA),
}
"""Every op that synchronises gradients.

Each of the ranks that share attention has its shard of the gradients, or all gradients of what they compute
alike: these are summed over other samples only. Of the partial gradients each rank has what its heads or its
tokens add.
"""
