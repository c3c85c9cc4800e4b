"""Ops of a block's computation: all tasks between two transfers."""

from __future__ import annotations

from penstock.graph.task import Task
from penstock.ops.base import OPS, Family, Kind, OpSpec, register
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work

CARRYING_PASSES = 7
"""Times that experts read or write rows with the residual stream, beyond those without: columns split off,
their norm, outputs times weights, the sum."""
REPLICATED = "gradients of L{layer}"
PARTIAL = "partial gradients of L{layer}"
EXPERTS = "expert gradients of L{layer}"
"""State: the gradients of a layer's replicated parameters; those among them to which every rank that shares
attention adds its part; and the gradients of its experts."""


def _copied(task: Task, sizes: Sizes) -> float:
    """Return the bytes copied to permute rows, or to un-permute them."""
    return sizes.hidden_bytes(2 * sizes.tokens(task) * sizes.top_k)


def _coded(task: Task, sizes: Sizes) -> float:
    """Return the bytes copied to encode rows for their transfer, or to decode them."""
    return sizes.coding_bytes(sizes.tokens(task) * sizes.top_k)


def _copies(task: Task, sizes: Sizes) -> Work:
    return Work(copied_bytes=_copied(task, sizes), kernels=sizes.kernels(sizes.tokens(task), "hidden"))


def _attention(task: Task, sizes: Sizes) -> Work:
    tokens = sizes.tokens(task)
    dense = 0.0 if sizes.moe_layers[task.layer] else sizes.dense_flops(tokens)
    copied_bytes = _copied(task, sizes) if dense else _copied(task, sizes) + _coded(task, sizes)
    return Work(
        flops=sizes.attention_flops(tokens) + dense,
        copied_bytes=copied_bytes,
        kernels=sizes.kernels(tokens, "attention", "dense" if dense else "router"),
    )


def _unpermuted(task: Task, sizes: Sizes) -> Work:
    copied_bytes = _copied(task, sizes) + _coded(task, sizes)
    return Work(copied_bytes=copied_bytes, kernels=sizes.kernels(sizes.tokens(task), "home"))


def _shared(task: Task, sizes: Sizes) -> Work:
    tokens = sizes.tokens(task)
    copied_bytes = sizes.hidden_bytes(2 * tokens)
    return Work(
        flops=sizes.shared_flops(tokens), copied_bytes=copied_bytes, kernels=sizes.kernels(tokens, "shared")
    )


def _experts(task: Task, sizes: Sizes) -> Work:
    """Return the work of a shard: it computes its part of the hidden width of every row."""
    rows = sizes.rows(task) * task.cut.row_copies
    passes = 2 + CARRYING_PASSES * sizes.packed_residual
    return Work(
        flops=sizes.expert_flops(rows) / sizes.etp_size,
        copied_bytes=passes * sizes.hidden_bytes(rows) + 2 * sizes.coding_bytes(rows),
        pieces=len(task.cut.held),
        follows_rows=True,
        kernels=sizes.kernels(rows, "experts", shares=sizes.etp_size),
    )


def _head(task: Task, sizes: Sizes) -> Work:
    tokens = sizes.tokens(task)
    copied_bytes = sizes.hidden_bytes(tokens)
    return Work(
        flops=sizes.head_flops(tokens),
        copied_bytes=copied_bytes,
        kernels=sizes.kernels(tokens, "head", "loss"),
    )


register(
    OpSpec(
        name=Op.EMBED,
        place="input",
        launches=4,
        title="token embedding",
        kind=Kind.COMPUTE,
        work=_copies,
        gradients=REPLICATED,
    ),
    OpSpec(
        name=Op.ATTENTION,
        turn="gated",
        family=Family.ATTENTION,
        launches=82,
        title="attention, router, permute (a dense block: all of it)",
        kind=Kind.COMPUTE,
        work=_attention,
        given=frozenset({"metadata"}),
        gradients=REPLICATED,
        recomputable=True,
    ),
    OpSpec(
        name=Op.SHARED,
        place="beside",
        family=Family.EXPERTS,
        title="shared experts",
        kind=Kind.COMPUTE,
        work=_shared,
        gradients=REPLICATED,
        recomputable=True,
    ),
    OpSpec(
        name=Op.EXPERTS,
        turn="computed",
        family=Family.EXPERTS,
        launches=16,
        title="expert computation",
        kind=Kind.COMPUTE,
        work=_experts,
        given=frozenset({"route", "replicas"}),
        indices="mc",
        gradients=EXPERTS,
        recomputable=True,
    ),
    OpSpec(
        name=Op.UNPERMUTE,
        place="after",
        launches=6,
        title="unpermute, gate weights, residual",
        kind=Kind.COMPUTE,
        work=_unpermuted,
        given=frozenset({"order", "metadata"}),
        gradients=REPLICATED,
    ),
    OpSpec(
        name=Op.HEAD,
        place="output",
        launches=8,
        title="final norm, output head, loss",
        kind=Kind.COMPUTE,
        work=_head,
        given=frozenset({"metadata"}),
        gradients=REPLICATED,
    ),
)


def computes_experts(op: str) -> bool:
    """Return whether tasks of an op compute routed experts: what they take follows the rows that come."""
    return op in OPS and OPS[op].gradients == EXPERTS
