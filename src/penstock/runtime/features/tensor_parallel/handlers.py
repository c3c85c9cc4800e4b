"""Handlers of tensor parallelism: tokens gathered and scattered, and computation on shards of weights.

Shapes: B samples, L tokens per sample (of all ranks that share them, or this rank's), M hidden size, T = B *
L tokens, V vocabulary of this rank, P ranks that share attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.features.tensor_parallel import ops as tensor
from penstock.graph import Phase, Task
from penstock.mesh import Axes
from penstock.ops import Op
from penstock.runtime.handlers import Inputs, Outputs, StepContext, handles
from penstock.runtime.ops.blocks import SavedRoute, added, microbatch, present, route, route_gradients
from penstock.runtime.segment import AnySegment
from penstock.runtime.statistics import HeadSums
from penstock.runtime.transport import Transport

F, B = Phase.FORWARD, Phase.BACKWARD
Move = Callable[[StepContext, Task, Tensor], Tensor]


# ---- moving tokens -----------------------------------------------------------------------------------------


def gather(context: StepContext, task: Task, mine_BLM: Tensor) -> Tensor:
    """Gather the tokens of all ranks, [B, L, M], from each rank's part of every sample."""
    lengths = context.tensor.lengths(context.batch.tokens[microbatch(task)].shape[1])
    return gathered(mine_BLM, lengths, _transport(context, task), task.axes)


def scatter(context: StepContext, task: Task, all_BLM: Tensor) -> Tensor:
    """Return the sum over ranks of this rank's part of every sample's tokens."""
    lengths = context.tensor.lengths(all_BLM.shape[1])
    return scattered(all_BLM, lengths, context.tensor.rank, _transport(context, task), task.axes)


def gathered(mine_BLM: Tensor, lengths: Sequence[int], transport: Transport, axes: Axes) -> Tensor:
    """Return the tokens of all ranks, each of which has so many of every sample."""
    samples, hidden = mine_BLM.shape[0], mine_BLM.shape[2]
    rows = mine_BLM.reshape(samples * mine_BLM.shape[1], hidden)
    sizes = [samples * length for length in lengths]
    parts = zip(transport.all_gather(rows, sizes, axes).split(sizes), lengths, strict=True)
    return torch.cat([part.view(samples, length, hidden) for part, length in parts], dim=1)


def scattered(all_BLM: Tensor, lengths: Sequence[int], rank: int, transport: Transport, axes: Axes) -> Tensor:
    """Return the sum over ranks of the tokens of this one."""
    samples, _, hidden = all_BLM.shape
    rows = torch.cat([part.reshape(-1, hidden) for part in all_BLM.split(list(lengths), dim=1)])
    mine = transport.reduce_scatter(rows, [samples * length for length in lengths], axes)
    return mine.view(samples, lengths[rank], hidden)


def reduce(context: StepContext, task: Task, all_BLM: Tensor) -> Tensor:
    """Return the sum over ranks, on all of them."""
    total_BLM = all_BLM.clone(memory_format=torch.contiguous_format)
    _transport(context, task).all_reduce(total_BLM, task.axes)
    return total_BLM


def keep(context: StepContext, task: Task, all_BLM: Tensor) -> Tensor:
    """Return this rank's part of every sample's tokens, all of which every rank has."""
    del task
    lengths = context.tensor.lengths(all_BLM.shape[1])
    first = sum(lengths[: context.tensor.rank])
    return all_BLM[:, first : first + lengths[context.tensor.rank]].contiguous()


def unchanged(context: StepContext, task: Task, all_BLM: Tensor) -> Tensor:
    """Return tokens unchanged."""
    del context, task
    return all_BLM


def _transport(context: StepContext, task: Task) -> Transport:
    return context.transports.of(task.lane, task.axes)


def _moves(role: str, op: str, forward: Move, backward: Move, also: str = "") -> None:
    """Register handlers of an op that moves one tensor, `role`; gradients of its readers are summed.

    also: a second name of the output, for readers whose gradients go another way.
    """

    def run(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        moved = forward(context, task, inputs.one(role))
        return {role: moved, also: moved} if also else {role: moved}

    def run_back(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        return {role: backward(context, task, added(inputs.all(f"d_{role}")))}

    if op:
        handles(op, F)(run)
        handles(op, B)(run_back)


for ways, before, after in (
    (tensor.ATTENTION, "hidden", "attended"),
    (tensor.DENSE, "tokens", "out"),
    (tensor.EMBED, "", "hidden"),
    (tensor.HEAD, "hidden", ""),
):
    _moves(before, ways.gather, gather, scatter, also="gathered")
    _moves(before, ways.copy, unchanged, reduce)
    _moves(after, ways.scatter, scatter, gather)
    _moves(after, ways.reduce, reduce, unchanged)
for op in (Op.KEEP_TOKENS, Op.KEEP_OUTPUT):
    _moves("hidden", op, keep, gather)
_moves("hidden", Op.GATHER_OUTPUT, gather, keep)


@handles(Op.GATHER_TOKENS, F)
def gathered_tokens(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: what attention has gathered; nothing is sent twice."""
    del context, task
    return {"hidden": inputs.one("gathered")}


@handles(Op.GATHER_TOKENS, B)
def gathered_tokens_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: the gradient of this rank's tokens, which every rank has whole: nothing is summed."""
    return {"hidden": keep(context, task, added(inputs.all("d_hidden")))}


@handles(Op.CHOICES, F)
def choices(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return choices: summed over the ranks that share every sample's tokens, [B, E]."""
    total_BE = inputs.one("choices").clone()
    _transport(context, task).all_reduce(total_BE, task.axes)
    return {"choices": total_BE}


# ---- computing on shards -----------------------------------------------------------------------------------


@handles(Op.HEADS, F)
def heads(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return attended: what this rank's heads add, [B, L, M] of all tokens."""
    block, keys = context.layers[task.layer].block, context.metadata_of(task, inputs).keys
    segment = context.segment()
    (h_BLM,) = segment.enter(inputs.one("hidden"))
    with context.autocast():
        (attended_BLM,) = segment.leave(block.mix(h_BLM, keys))
    return {"attended": attended_BLM, "saved": segment}


@handles(Op.HEADS, B)
def heads_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: what this rank's heads add to the gradient of all tokens."""
    return _one_back("hidden", "attended", context, task, inputs)


@handles(Op.GATE, F)
def gate(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return all outputs of `route`."""
    layer = context.layers[task.layer]
    segment = context.segment()
    h_BLM, attended_BLM = segment.enter(inputs.one("hidden"), inputs.one("attended"))
    with context.autocast():
        known = context.metadata_of(task, inputs)
        residual_BLM, x_TM = layer.block.settle(h_BLM, attended_BLM, known.keys)
        return route(context, task, known, segment, residual_BLM, x_TM)


@handles(Op.GATE, B)
def gate_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return gradients of the residual stream before attention, and of what attention added to it."""
    saved: SavedRoute = inputs.one("saved")
    h_BLM, attended_BLM = saved.segment.backward(route_gradients(context, task, saved, inputs))
    return {"hidden": present(h_BLM, task), "attended": present(attended_BLM, task)}


@handles(Op.DENSE_NORM, F)
def dense_norm(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return residual, tokens: the residual stream after attention and its norm, [B, L, M]."""
    block, keys = context.layers[task.layer].block, context.metadata_of(task, inputs).keys
    segment = context.segment()
    h_BLM, attended_BLM = segment.enter(inputs.one("hidden"), inputs.one("attended"))
    with context.autocast():
        residual_BLM, x_TM = block.settle(h_BLM, attended_BLM, keys)
        residual_BLM, x_BLM = segment.leave(residual_BLM, x_TM.view_as(residual_BLM))
    return {"residual": residual_BLM, "tokens": x_BLM, "saved": segment}


@handles(Op.DENSE_NORM, B)
def dense_norm_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return gradients of the residual stream before attention, and of what attention added to it."""
    del context
    segment: AnySegment = inputs.one("saved")
    h_BLM, attended_BLM = segment.backward([inputs.one("d_residual"), inputs.one("d_tokens")])
    return {"hidden": present(h_BLM, task), "attended": present(attended_BLM, task)}


@handles(Op.DENSE, F)
def dense(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return out: what this rank's part of the hidden width adds, [B, L, M] of all tokens."""
    block = context.layers[task.layer].block
    segment = context.segment()
    (x_BLM,) = segment.enter(inputs.one("tokens"))
    with context.autocast():
        (out_BLM,) = segment.leave(block.dense(x_BLM.flatten(0, 1)).view_as(x_BLM))
    return {"out": out_BLM, "saved": segment}


@handles(Op.DENSE, B)
def dense_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return tokens: what this rank's part adds to the gradient of tokens."""
    return _one_back("tokens", "out", context, task, inputs)


@handles(Op.DENSE_ADD, F)
def dense_add(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: what leaves the block."""
    block, keys = context.layers[task.layer].block, context.metadata_of(task, inputs).keys
    segment = context.segment()
    residual_BLM, out_BLM = segment.enter(inputs.one("residual"), inputs.one("out"))
    with context.autocast():
        (h_BLM,) = segment.leave(block.add(residual_BLM, out_BLM.flatten(0, 1), keys))
    return {"hidden": h_BLM, "saved": segment}


@handles(Op.DENSE_ADD, B)
def dense_add_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return gradients of the residual stream and of what is added to it."""
    del context
    segment: AnySegment = inputs.one("saved")
    residual_BLM, out_BLM = segment.backward([added(inputs.all("d_hidden"))])
    return {"residual": present(residual_BLM, task), "out": present(out_BLM, task)}


def _one_back(role: str, left: str, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Run the backward of a segment with one input, `role`, and one output, `left`."""
    del context
    segment: AnySegment = inputs.one("saved")
    (grad_BLM,) = segment.backward([added(inputs.all(f"d_{left}"))])
    return {role: present(grad_BLM, task)}


# ---- the head, of which every rank has a shard of the vocabulary -------------------------------------------


@handles(Op.LOGITS, F)
def logits(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return logits and peaks, as the step's ending makes them of all tokens."""
    return context.ending.shards.logits(context, task, inputs)


@handles(Op.LOGITS, B)
def logits_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: a summand of the gradient of all tokens."""
    return context.ending.shards.logits_backward(context, task, inputs)


@handles(Op.PEAKS, F)
def peaks(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return peaks: those of every rank, [P, T, 3]."""
    mine_T3: Tensor = inputs.one("peaks")
    size = context.tensor.size
    found = _transport(context, task).all_gather(mine_T3.unsqueeze(0), [1] * size, task.axes)
    return {"peaks": found}


@handles(Op.LOSS, F)
def loss(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return loss: sums of a microbatch, on the first of the ranks that have it; zeros on the others."""
    found = context.ending.shards.loss(context, task, inputs)
    if not context.counts_once(task):
        sums = found["loss"]
        found = {**found, "loss": HeadSums(sums.loss * 0, sums.valid * 0, 0)}
    return found


@handles(Op.LOSS, B)
def loss_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return logits: their gradient."""
    return context.ending.shards.loss_backward(context, task, inputs)
