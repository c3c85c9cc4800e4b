"""Balance without a loss (DeepSeek-V3): a bias per expert that steers the choice and not the weights.

After every optimiser step the bias of an expert that got less than its share rises by `rate`, that of an
expert that got more falls by it. Only what was trained on is counted: a forward pass counts once, when its
backward has run, so evaluation and recomputation do not count and gradient accumulation adds up.
Shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ExpertBias(nn.Module):
    """The bias of one layer's experts and the choices counted since its last update.

    Neither is cast with a model that is cast to bfloat16: steps of 0.001 and counts would be lost there.
    """

    value_E: Tensor
    counted_E: Tensor

    def __init__(self, num_experts: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("value_E", torch.zeros(num_experts))
        self.register_buffer("counted_E", torch.zeros(num_experts, dtype=torch.int64))

    def count(self, chosen_E: Tensor) -> None:
        """Add the choices of a pass whose backward has run."""
        self.counted_E += chosen_E.to(self.counted_E.dtype)

    def forget(self) -> None:
        """Drop what has been counted since the last update, because the step was not applied."""
        self.counted_E.zero_()

    def when_trained(self, weights: Tensor, chosen_E: Tensor) -> Tensor:
        """Return `weights` unchanged; `chosen_E` is counted when their gradient comes back."""
        counted: Tensor = _CountInBackward.apply(weights, chosen_E, self)
        return counted

    @torch.no_grad()
    def update(self, sum_over_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        """Move the bias once, after an optimiser step.

        sum_over_ranks: sums counts over ranks, where the counts here are those of one rank.
        """
        counted_E = self.counted_E.double()
        if sum_over_ranks is not None:
            counted_E = sum_over_ranks(counted_E)
        missing_E = counted_E.mean() - counted_E
        self.value_E += self.rate * missing_E.sign().to(self.value_E.dtype)
        self.counted_E.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertBias:
        super()._apply(fn, recurse)
        self.value_E = self.value_E.float()  # whatever the rest of the model was cast to
        return self


class _CountInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, chosen_E: Tensor, bias: ExpertBias) -> Tensor:
        ctx.bias, ctx.counted = bias, False
        ctx.save_for_backward(chosen_E)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (chosen_E,) = ctx.saved_tensors
        if not ctx.counted:  # a graph that was retained may run backward again
            ctx.bias.count(chosen_E)
        ctx.counted = True
        return grads[0], None, None
