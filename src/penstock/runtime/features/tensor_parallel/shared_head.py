"""The loss of labels where every rank has a shard of the vocabulary: logits stay where they are made.

Shapes: B samples, L tokens per sample (of all ranks that share them), M hidden size, T = B * L tokens, V
vocabulary of this rank, P ranks that share attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.graph import Task
from penstock.runtime.batch import NO_LABEL
from penstock.runtime.checks.samples import check_vocabulary
from penstock.runtime.cross_entropy import in_pieces
from penstock.runtime.handlers import Inputs, Outputs, StepContext
from penstock.runtime.ops.blocks import added, present
from penstock.runtime.segment import AnySegment
from penstock.runtime.statistics import HeadSums, StepStatistics


@dataclass(frozen=True)
class ShardLogits:
    """Logits over this rank's vocabulary.

    mine_T: the label's place in this rank's vocabulary, -1 where it is another rank's or counts for nothing.
    """

    logits_TV: Tensor
    mine_T: Tensor


@dataclass(frozen=True)
class SavedLoss:
    """The forward values that the backward of the loss needs.

    total_T: logarithm of the sum of all exponentials. counts_T: whether a token has a label.
    """

    shard: ShardLogits
    total_T: Tensor
    counts_T: Tensor


class LossOverShards:
    """Makes the loss of what all shards know of a token's logits."""

    def logits(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return logits: those of this rank's vocabulary; peaks: [T, 3] float64 or float32, see `_peaks`."""
        parts = context.parts
        segment = context.segment()
        (h_BLM,) = segment.enter(inputs.one("hidden"))
        with context.autocast():
            (logits_TV,) = segment.leave(parts.logits(h_BLM))
        mine_T = _mine(context, context.metadata_of(task, inputs).labels_BL.flatten(), logits_TV.shape[1])
        found = ShardLogits(logits_TV, mine_T)
        peaks_T3 = torch.cat(
            [_peaks(_precise(part_TV), part_T) for part_TV, part_T in in_pieces(logits_TV, mine_T)]
        )
        return {"logits": found, "peaks": peaks_T3, "saved": segment}

    def logits_backward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return hidden: what this rank's vocabulary adds to the gradient of all tokens."""
        del context
        segment: AnySegment = inputs.one("saved")
        (grad_BLM,) = segment.backward([added(inputs.all("d_logits"))])
        return {"hidden": present(grad_BLM, task)}

    def loss(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return loss: sums of a microbatch."""
        known = context.metadata_of(task, inputs)
        most_PT, sums_PT, labelled_PT = inputs.one("peaks").unbind(dim=-1)
        most_T = most_PT.amax(dim=0)
        total_T = (sums_PT * (most_PT - most_T).exp()).sum(dim=0).log() + most_T
        labels_T = known.labels_BL.flatten()
        counts_T = labels_T >= 0
        loss = ((total_T - labelled_PT.sum(dim=0)) * counts_T).sum()
        sums = HeadSums(loss, counts_T.sum(), known.num_tokens())
        return {"loss": sums, "saved": SavedLoss(inputs.one("logits"), total_T, counts_T)}

    def loss_backward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return logits: their gradient, probability minus one for the label, [T, V]."""
        del task
        statistics: StepStatistics = inputs.one("d_loss")
        saved: SavedLoss = inputs.one("saved")
        logits_TV, mine_T = saved.shard.logits_TV, saved.shard.mine_T
        slope = (context.slopes.loss / statistics.valid).to(saved.total_T.dtype)
        grad_TV = torch.empty_like(logits_TV)
        parts = in_pieces(logits_TV, mine_T, saved.total_T, saved.counts_T * slope, grad_TV)
        for part_TV, place_T, total_T, slope_T, out_TV in parts:
            slope_TV = (_precise(part_TV) - total_T.unsqueeze(1)).exp_()
            here_T1 = (place_T >= 0).to(slope_TV).unsqueeze(1)  # without asking the device which these are
            slope_TV.scatter_add_(1, place_T.clamp(min=0).unsqueeze(1), -here_T1)
            out_TV.copy_(slope_TV.mul_(slope_T.unsqueeze(1)))
        return {"logits": grad_TV}


def _precise(logits_TV: Tensor) -> Tensor:
    return logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))


def _mine(context: StepContext, labels_T: Tensor, width: int) -> Tensor:
    """Return the places of labels in this rank's vocabulary, [T]; -1 for labels outside it."""
    check_vocabulary("label", labels_T, width * context.tensor.size, besides=NO_LABEL)
    place_T = labels_T - context.tensor.rank * width
    return torch.where((labels_T >= 0) & (place_T >= 0) & (place_T < width), place_T, -1)


def _peaks(logits_TV: Tensor, mine_T: Tensor) -> Tensor:
    """Return what others must know of every token: the largest logit here, the sum of exponentials relative
    to it, and the label's logit if it is here (else 0)."""
    most_T = logits_TV.amax(dim=1)
    sums_T = (logits_TV - most_T.unsqueeze(1)).exp().sum(dim=1)
    label_T = logits_TV.gather(1, mine_T.clamp(min=0).unsqueeze(1)).squeeze(1) * (mine_T >= 0)
    return torch.stack([most_T, sums_T, label_T], dim=1)
