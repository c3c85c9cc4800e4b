"""Handlers of a block's computation, except its experts: each runs one segment of the model.

Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens, E experts, R rows in expert order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.graph import Phase, Task
from penstock.moe.choices import RouterSums
from penstock.ops import Op
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles
from penstock.runtime.ops.transfers import joined
from penstock.runtime.sample_metadata import SampleMetadata
from penstock.runtime.segment import AnySegment
from penstock.runtime.statistics import StepStatistics
from penstock.runtime.transport.legs import Later

F, B = Phase.FORWARD, Phase.BACKWARD
BESIDE_ROWS = ("residual", "weights", "shared")
"""Inputs of unpermute that outputs are added to, multiplied by and joined by, unless rows brought them."""


@dataclass(frozen=True)
class SavedRoute:
    """The forward values that the backward of a task with a gate needs."""

    segment: AnySegment
    chosen_BE: Tensor


@dataclass(frozen=True)
class SavedUnpermute:
    """The values that U.B needs of U.F. roles: of what entered U.F. sizes: rows of every slice."""

    segment: AnySegment
    roles: tuple[str, ...]
    sizes: tuple[int, ...]


@handles(Op.EMBED, F)
def embed(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: [B, L, M]."""
    tokens_BL = context.batch.tokens[microbatch(task)]
    keys = context.metadata_of(task, inputs).keys
    segment = context.segment()
    segment.enter()
    with context.autocast():
        (h_BLM,) = segment.leave(context.parts.embed(tokens_BL, keys))
    return {"hidden": h_BLM, "saved": segment}


@handles(Op.EMBED, B)
def embed_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Accumulate the gradients of the embedding."""
    del context, task
    segment: AnySegment = inputs.one("saved")
    segment.backward([added(inputs.all("d_hidden"))])
    return NOTHING


@handles(Op.ATTENTION, F)
def attention(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return, in a dense block, hidden: [B, L, M]; in an MoE block, all outputs of `route`."""
    layer, known = context.layers[task.layer], context.metadata_of(task, inputs)
    segment = context.segment()
    (h_BLM,) = segment.enter(inputs.one("hidden"))
    with context.autocast():
        residual_BLM, x_TM = layer.block.attend(h_BLM, known.keys)
        if layer.moe is not None:
            return route(context, task, known, segment, residual_BLM, x_TM)
        (out_BLM,) = segment.leave(layer.block.add(residual_BLM, layer.block.dense(x_TM), known.keys))
    return {"hidden": out_BLM, "saved": segment}


def route(
    context: StepContext,
    task: Task,
    known: SampleMetadata,
    segment: AnySegment,
    residual_BLM: Tensor,
    x_TM: Tensor,
) -> Outputs:
    """Choose experts for the tokens of a segment, and end it.

    Returns rows: a tensor [R, M] per slice; order: how they were permuted; routers: the gate's sums;
    positions: what every token chose, [T, k], where tokens choose; counts: rows for every rank where they are
    exchanged, or their bounds; route: the sizes where they are fixed.
    """
    layer = context.layers[task.layer]
    routed = context.residual_transport.route(layer, residual_BLM, x_TM, known.info, task.cut.slices)
    sums, plan = routed.sums, routed.plan
    handed_out = [] if sums.logits_TE is None else [sums.logits_TE]
    residual_BLM, rows_RM, weights, probability_BE, z, x_TM, *handed_out = segment.leave(
        residual_BLM, routed.rows_RM, routed.weights, sums.probability_BE, sums.z, routed.x_TM, *handed_out
    )
    for logits_TE in handed_out:
        context.ending.take(task, logits_TE)
    maker = context.maker(task.layer)
    slots = sum(plan.slots) if plan.slots is not None and routed.positions_Tk is not None else None
    counted = RouterSums(sums.chosen_BE, probability_BE, z, ids_B=known.keys.sample_ids_B, slots=slots)
    counted = replace(counted, wanted_N=plan.wanted_N)
    if not context.counts_once(task):  # another rank has the same tokens and counts them
        chosen_BE, probability_BE, z = map(torch.zeros_like, (sums.chosen_BE, probability_BE, z))
        ids_B = known.keys.sample_ids_B
        counted = RouterSums(chosen_BE, probability_BE, z, ids_B=ids_B, wanted_N=plan.wanted_N)
    return {
        "residual": residual_BLM,
        "rows": rows_RM.split_with_sizes(plan.chunk_rows),
        "weights": weights,
        "order": plan,
        "tokens": x_TM,
        "positions": routed.positions_Tk,
        "counts": plan.counts_CN if plan.bounds_CN is None else plan.bounds_CN,
        "route": None
        if plan.slots is None
        else maker.even(plan.slots, layer.experts.num_local_experts, context.degrees),
        "choices": sums.chosen_BE,
        "routers": counted,
        "saved": SavedRoute(segment, sums.chosen_BE),
    }


@handles(Op.ATTENTION, B)
def attention_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: the gradient of what entered the block, [B, L, M]."""
    saved: SavedRoute | AnySegment = inputs.one("saved")
    if isinstance(saved, SavedRoute):
        (grad_BLM,) = saved.segment.backward(route_gradients(context, task, saved, inputs))
    else:
        (grad_BLM,) = saved.backward([added(inputs.all("d_hidden"))])
    return {"hidden": present(grad_BLM, task)}


def route_gradients(
    context: StepContext, task: Task, saved: SavedRoute, inputs: Inputs
) -> list[Tensor | None]:
    """Return gradients of all outputs of `route`, in their order; None for an output without a gradient."""
    statistics: StepStatistics = inputs.one("d_routers")
    y = context.layers[task.layer].before
    judged_BE = inputs.maybe("d_choices")
    judged_BE = saved.chosen_BE if judged_BE is None else judged_BE
    slope_BE = context.balance.slope(judged_BE, statistics.chosen_YE, y, statistics.tokens)
    residual = inputs.all("d_residual")
    return [
        added(residual) if residual else None,
        joined([rows for chunk in inputs.all("d_rows") for rows in chunk]),
        inputs.maybe("d_weights"),
        context.balance_slope * slope_BE,
        context.z_slope,
        inputs.maybe("d_tokens"),
        *context.ending.router_gradients(task),
    ]


@handles(Op.SHARED, F)
def shared(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return shared: the output of the shared experts, [T, M]."""
    moe = context.layers[task.layer].experts
    assert moe.shared is not None, task
    segment = context.segment()
    (x_TM,) = segment.enter(inputs.one("tokens"))
    with context.autocast():
        (out_TM,) = segment.leave(moe.shared(x_TM))
    return {"shared": out_TM, "saved": segment}


@handles(Op.SHARED, B)
def shared_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return tokens: the gradient of what shared experts read, [T, M]."""
    del context
    segment: AnySegment = inputs.one("saved")
    (grad_TM,) = segment.backward([inputs.one("d_shared")])
    return {"tokens": present(grad_TM, task)}


@handles(Op.UNPERMUTE, F)
def unpermute(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: what leaves the block, [B, L, M]."""
    layer, known = context.layers[task.layer], context.metadata_of(task, inputs)
    slices = [rows for chunk in inputs.all("rows") for rows in chunk]
    given = {"rows": joined(slices), **{r: inputs.one(r) for r in BESIDE_ROWS if r in inputs}}
    segment = context.segment()
    entered = dict(zip(given, segment.enter(*given.values()), strict=True))
    plan, beside = Later.of(inputs.one("order")), map(entered.get, BESIDE_ROWS)
    residual_BLM, weights, shared_TM = beside
    with context.autocast():
        out_TM = layer.experts.unpermute(entered["rows"], weights, plan, shared_TM)
        if residual_BLM is None:  # rows have it
            out_BLM = out_TM.view(*known.labels_BL.shape, out_TM.shape[1])
        else:
            out_BLM = layer.block.add(residual_BLM, out_TM, known.keys)
        (h_BLM,) = segment.leave(out_BLM)
    return {
        "hidden": h_BLM,
        "saved": SavedUnpermute(segment, tuple(given), tuple(rows.shape[0] for rows in slices)),
    }


@handles(Op.UNPERMUTE, B)
def unpermute_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return gradients of all that entered U: rows by slice, and the inputs beside them; that of weights is
    None where they travelled with the rows."""
    del context
    saved: SavedUnpermute = inputs.one("saved")
    found = saved.segment.backward([added(inputs.all("d_hidden"))])
    grads = dict(zip(saved.roles, found, strict=True))
    return {**grads, "rows": present(grads["rows"], task).split_with_sizes(saved.sizes)}


@handles(Op.HEAD, F)
def head(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return loss: sums of a microbatch."""
    return context.ending.forward(context, task, inputs)


@handles(Op.HEAD, B)
def head_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: the gradient of what entered the head, [B, L, M]."""
    return context.ending.backward(context, task, inputs)


def microbatch(task: Task) -> int:
    """Return the number of a task's microbatch."""
    assert task.microbatch is not None, task
    return task.microbatch


def present(grad: Tensor | None, task: Task) -> Tensor:
    """Return a gradient that every input of a segment must have."""
    assert grad is not None, f"{task}: every input of a segment must reach its outputs"
    return grad


def added(grads: Sequence[Tensor]) -> Tensor:
    """Return the sum of several gradients of one output, in the order of their tasks."""
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    return total
