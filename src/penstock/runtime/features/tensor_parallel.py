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
from penstock.ops import Op
from penstock.runtime.batch import NO_LABEL, check_vocabulary, part_of
from penstock.runtime.endings import HiddenStates
from penstock.runtime.handlers import Inputs, Outputs, StepContext, handles
from penstock.runtime.ops import (
    SavedRoute,
    added,
    computes,
    microbatch,
    present,
    route,
    route_gradients,
    segment_gradients,
)
from penstock.runtime.statistics import HeadSums, StepStatistics, in_pieces
from penstock.runtime.transport import gathered, scattered

F, B = Phase.FORWARD, Phase.BACKWARD
Move = Callable[[StepContext, Task, Tensor], Tensor]


# ---- moving tokens -----------------------------------------------------------------------------------------


def gather(context: StepContext, task: Task, mine_BLM: Tensor) -> Tensor:
    """Gather the tokens of all ranks, [B, L, M], from each rank's part of every sample."""
    lengths = context.tensor.lengths(context.batch.tokens[microbatch(task)].shape[1])
    return gathered(mine_BLM, lengths, context.transport(task), task.axes)


def scatter(context: StepContext, task: Task, all_BLM: Tensor) -> Tensor:
    """Return the sum over ranks of this rank's part of every sample's tokens."""
    lengths = context.tensor.lengths(all_BLM.shape[1])
    return scattered(all_BLM, lengths, context.tensor.rank, context.transport(task), task.axes)


def reduce(context: StepContext, task: Task, all_BLM: Tensor) -> Tensor:
    """Return the sum over ranks, on all of them."""
    total_BLM = all_BLM.clone(memory_format=torch.contiguous_format)
    context.transport(task).all_reduce(total_BLM, task.axes)
    return total_BLM


def keep(context: StepContext, task: Task, all_BLM: Tensor) -> Tensor:
    """Return this rank's part of every sample's tokens, all of which every rank has."""
    del task
    here = part_of(all_BLM.shape[1], context.tensor.rank, context.tensor.size)
    return all_BLM[:, here].contiguous()


def unchanged(context: StepContext, task: Task, all_BLM: Tensor) -> Tensor:
    """Return tokens unchanged."""
    del context, task
    return all_BLM


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
    context.transport(task).all_reduce(total_BE, task.axes)
    return {"choices": total_BE}


# ---- computing on shards -----------------------------------------------------------------------------------


@computes(Op.HEADS, ("hidden",), ("attended",))
def heads(context: StepContext, task: Task, inputs: Inputs, h_BLM: Tensor) -> Sequence[Tensor]:
    """Return attended: what this rank's heads add, [B, L, M] of all tokens."""
    block, keys = context.layers[task.layer].block, context.metadata_of(task, inputs).keys
    return (block.mix(h_BLM, keys),)


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


@computes(Op.DENSE_NORM, ("hidden", "attended"), ("residual", "tokens"))
def dense_norm(
    context: StepContext, task: Task, inputs: Inputs, h_BLM: Tensor, attended_BLM: Tensor
) -> Sequence[Tensor]:
    """Return residual, tokens: the residual stream after attention and its norm, [B, L, M]."""
    block, keys = context.layers[task.layer].block, context.metadata_of(task, inputs).keys
    residual_BLM, x_TM = block.settle(h_BLM, attended_BLM, keys)
    return residual_BLM, x_TM.view_as(residual_BLM)


@computes(Op.DENSE, ("tokens",), ("out",))
def dense(context: StepContext, task: Task, inputs: Inputs, x_BLM: Tensor) -> Sequence[Tensor]:
    """Return out: what this rank's part of the hidden width adds, [B, L, M] of all tokens."""
    del inputs
    return (context.layers[task.layer].block.dense(x_BLM.flatten(0, 1)).view_as(x_BLM),)


@computes(Op.DENSE_ADD, ("residual", "out"), ("hidden",))
def dense_add(
    context: StepContext, task: Task, inputs: Inputs, residual_BLM: Tensor, out_BLM: Tensor
) -> Sequence[Tensor]:
    """Return hidden: what leaves the block."""
    block, keys = context.layers[task.layer].block, context.metadata_of(task, inputs).keys
    return (block.add(residual_BLM, out_BLM.flatten(0, 1), keys),)


# ---- the head, of which every rank has a shard of the vocabulary -------------------------------------------


def _shards(context: StepContext) -> HiddenStates | LossOverShards:
    """Return what stands for the ending's `forward` and `backward` where ranks share the vocabulary."""
    ending = context.ending
    return ending if isinstance(ending, HiddenStates) else LossOverShards()


@handles(Op.LOGITS, F)
def logits(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return logits and peaks, as the step's ending makes them of all tokens."""
    return _shards(context).logits(context, task, inputs)


@handles(Op.LOGITS, B)
def logits_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: a summand of the gradient of all tokens."""
    return _shards(context).logits_backward(context, task, inputs)


@handles(Op.PEAKS, F)
def peaks(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return peaks: those of every rank, [P, T, 3]."""
    mine_T3: Tensor = inputs.one("peaks")
    size = context.tensor.size
    found = context.transport(task).all_gather(mine_T3.unsqueeze(0), [1] * size, task.axes)
    return {"peaks": found}


@handles(Op.LOSS, F)
def loss(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return loss: sums of a microbatch, on the first of the ranks that have it; zeros on the others."""
    found = _shards(context).loss(context, task, inputs)
    if not context.counts_once(task):
        sums = found["loss"]
        found = {**found, "loss": HeadSums(sums.loss * 0, sums.valid * 0, 0)}
    return found


@handles(Op.LOSS, B)
def loss_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return logits: their gradient."""
    return _shards(context).loss_backward(context, task, inputs)


# ---- the loss of labels where every rank has a shard of the vocabulary: logits stay where they are made


class LossOverShards:
    """Makes the loss of what all shards know of a token's logits."""

    def logits(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return logits: those of this rank's vocabulary, [T, V], and every label's place in it, [T].

        The place is -1 where the label is another rank's or counts for nothing. And peaks, [T, 3] float64 or
        float32: what others must know of every token, which is the largest logit here, the sum of
        exponentials relative to it, and the label's logit if it is here (else 0).
        """
        parts = context.parts
        segment = context.segment()
        (h_BLM,) = segment.enter(inputs.one("hidden"))
        with context.autocast():
            (logits_TV,) = segment.leave(parts.logits(h_BLM))
        labels_T, width = context.metadata_of(task, inputs).labels_BL.flatten(), logits_TV.shape[1]
        check_vocabulary("label", labels_T, width * context.tensor.size, besides=NO_LABEL)
        place_T = labels_T - context.tensor.rank * width
        mine_T = torch.where((labels_T >= 0) & (place_T >= 0) & (place_T < width), place_T, -1)
        peaks = []
        for part_TV, part_T in in_pieces(logits_TV, mine_T):
            precise_TV = _precise(part_TV)
            most_T = precise_TV.amax(dim=1)
            sums_T = (precise_TV - _finite(most_T).unsqueeze(1)).exp().sum(dim=1)
            label_T = precise_TV.gather(1, part_T.clamp(min=0).unsqueeze(1)).squeeze(1)
            peaks.append(torch.stack([most_T, sums_T, torch.where(part_T >= 0, label_T, 0)], dim=1))
        return {"logits": (logits_TV, mine_T), "peaks": torch.cat(peaks), "saved": segment}

    def logits_backward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return hidden: what this rank's vocabulary adds to the gradient of all tokens."""
        del context
        return segment_gradients(("hidden",), ("logits",), task, inputs)

    def loss(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return loss: sums of a microbatch."""
        known = context.metadata_of(task, inputs)
        most_PT, sums_PT, labelled_PT = inputs.one("peaks").unbind(dim=-1)
        most_T = _finite(most_PT.amax(dim=0))
        total_T = (sums_PT * (most_PT - most_T).exp()).sum(dim=0).log() + most_T
        labels_T = known.labels_BL.flatten()
        counts_T = labels_T >= 0
        loss = ((total_T - labelled_PT.sum(dim=0)) * counts_T).sum()
        sums = HeadSums(loss, counts_T.sum(), known.num_tokens())
        return {"loss": sums, "saved": (*inputs.one("logits"), total_T, counts_T)}

    def loss_backward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return logits: their gradient, probability minus one for the label, [T, V]."""
        del task
        statistics: StepStatistics = inputs.one("d_loss")
        logits_TV, mine_T, total_T, counts_T = inputs.one("saved")
        slope = (context.slopes.loss / statistics.valid).to(total_T.dtype)
        grad_TV = torch.empty_like(logits_TV)
        parts = in_pieces(logits_TV, mine_T, total_T, counts_T * slope, grad_TV)
        for part_TV, place_T, sum_T, slope_T, out_TV in parts:
            slope_TV = (_precise(part_TV) - sum_T.unsqueeze(1)).exp_()
            here_T1 = (place_T >= 0).to(slope_TV).unsqueeze(1)  # without asking the device which these are
            slope_TV.scatter_add_(1, place_T.clamp(min=0).unsqueeze(1), -here_T1)
            out_TV.copy_(slope_TV.mul_(slope_T.unsqueeze(1)))
        return {"logits": grad_TV}


def _precise(logits_TV: Tensor) -> Tensor:
    return logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))


def _finite(most_T: Tensor) -> Tensor:
    """Return what exponents are relative to: of tokens that a model rules out all logits may be -inf."""
    return most_T.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
