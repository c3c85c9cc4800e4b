"""Ops that sum over ranks: the loss and its statistics, and gradients."""

from __future__ import annotations

from penstock.ops.base import Backward, Kind, OpSpec, register
from penstock.ops.names import Op

register(
    OpSpec(
        name=Op.STATISTICS,
        title="sums of loss, tokens and balance statistics",
        kind=Kind.COLLECTIVE,
        backward=Backward.VALUE,
        indices="",
    ),
    OpSpec(
        name=Op.ALL_REDUCE,
        title="all-reduce of replicated gradients",
        kind=Kind.COLLECTIVE,
        backward=Backward.NONE,
        indices="p",
    ),
    OpSpec(
        name=Op.EXPERT_ALL_REDUCE,
        title="all-reduce of expert gradients over their replicas",
        kind=Kind.COLLECTIVE,
        backward=Backward.NONE,
        indices="p",
    ),
)
REDUCTIONS = (Op.ALL_REDUCE, Op.EXPERT_ALL_REDUCE)
"""Every op that synchronises gradients."""
