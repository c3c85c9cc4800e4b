"""The loss over a vocabulary, computed a piece of the tokens at a time.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.runtime.batch import NO_LABEL

NUMBERS_AT_ONCE = 1 << 24
"""Logits of a piece: 64 MiB in float32, which keeps a GPU busy and is small beside the logits of a
microbatch."""


def cross_entropy_sum(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the sum of all tokens' cross entropies, computed in float32 or wider.

    PyTorch's own function keeps the logarithms of all probabilities for backward, and needs logits that are
    in float32 before: of bfloat16 logits 16 bytes per number at the peak. Pieces need 4: the logits, and
    their gradient.

    Args:
        logits_TV: [T, V], of any floating type.
        labels_T: [T], tokens of the vocabulary or -100.

    Raises:
        IndexError: for a label outside the vocabulary, on a CPU; a GPU ends with an assertion on the device.
    """
    if logits_TV.numel() <= NUMBERS_AT_ONCE:
        precise_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return F.cross_entropy(precise_TV, labels_T, ignore_index=NO_LABEL, reduction="sum")
    loss: Tensor = _InPieces.apply(logits_TV, labels_T)
    return loss


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        found = [_losses(*pieces) for pieces in in_pieces(logits_TV, labels_T)]
        losses_T, totals_T = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(logits_TV, labels_T, totals_T)
        return losses_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits_TV, labels_T, totals_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for piece_TV, piece_T, total_T, out_TV in in_pieces(logits_TV, labels_T, totals_T, grad_TV):
            known_T1 = (piece_T != NO_LABEL).unsqueeze(1)
            slope_TV = (piece_TV.to(total_T.dtype) - total_T.unsqueeze(1)).exp_()
            label_T1 = piece_T.unsqueeze(1).where(known_T1, 0)
            slope_TV.scatter_add_(1, label_T1, -torch.ones_like(total_T).unsqueeze(1))
            out_TV.copy_(slope_TV.mul_(known_T1 * grads[0]))
        return grad_TV, None


def in_pieces(logits_TV: Tensor, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the pieces of several tensors, cut by tokens so that a piece has not too many logits."""
    tokens = max(1, NUMBERS_AT_ONCE // logits_TV.shape[1])
    return zip(*(each.split(tokens) for each in (logits_TV, *more)), strict=True)


def _losses(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return every token's cross entropy, and the logarithm of the sum of its exponentials."""
    precise_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    totals_T = precise_TV.logsumexp(dim=1)
    losses_T = totals_T + F.nll_loss(precise_TV, labels_T, ignore_index=NO_LABEL, reduction="none")
    return losses_T.masked_fill_(labels_T == NO_LABEL, 0), totals_T
