"""Ops of a block's computation: everything between two transfers."""

from __future__ import annotations

from penstock.ops.base import Kind, OpSpec, register
from penstock.ops.names import Op

REPLICATED = "gradients of L{layer}"
EXPERTS = "expert gradients of L{layer}"
"""State: the gradients of a layer's replicated parameters, and those of its experts."""

register(
    OpSpec(name=Op.EMBED, title="token and position embedding", kind=Kind.COMPUTE, gradients=REPLICATED),
    OpSpec(
        name=Op.ATTENTION,
        title="attention, router and order (a dense block: all of it)",
        kind=Kind.COMPUTE,
        gradients=REPLICATED,
    ),
    OpSpec(name=Op.SHARED, title="shared experts", kind=Kind.COMPUTE, gradients=REPLICATED),
    OpSpec(
        name=Op.EXPERTS,
        title="expert computation",
        kind=Kind.COMPUTE,
        given=frozenset({"route"}),
        indices="mc",
        gradients=EXPERTS,
    ),
    OpSpec(
        name=Op.UNORDER,
        title="un-order, gate weights, residual",
        kind=Kind.COMPUTE,
        given=frozenset({"order"}),
        gradients=REPLICATED,
    ),
    OpSpec(name=Op.HEAD, title="final norm, output head, loss", kind=Kind.COMPUTE, gradients=REPLICATED),
)
