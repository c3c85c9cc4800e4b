"""Gates that judge experts with one matrix: softmax, sigmoid, and softmax with learnt noise.

Shapes: T tokens, B samples of L tokens, M hidden size, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.moe.counter import normal
from penstock.moe.gates.base import TokenGate, linear_weight
from penstock.moe.tokens import Tokens

FIRST_PLACE = 1 << 20
"""Where noise begins in the counter's numbering: far above the dropouts, which count from 0."""


class SoftmaxGate(TokenGate):
    """Probabilities over all experts from one matrix; a token's choices are the k largest.

    GShard, Switch, Mixtral (weights renormalised), Qwen3-MoE, OLMoE (weights unchanged).

    hidden_size: M. The other parameters are those of TokenGate.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, **options: Any) -> None:
        super().__init__(num_experts, top_k, **options)
        self.weight = linear_weight(num_experts, hidden_size)

    def logits(self, x_TM: Tensor, tokens: Tokens) -> Tensor:
        del tokens
        return x_TM @ self.weight.to(x_TM.dtype).t()


class SigmoidGate(SoftmaxGate):
    """A gate whose scores are sigmoids of the logits, each expert by itself. Parameters as in SoftmaxGate.

    BASE layers, StableMoE and DeepSeek-V3 (arXiv 2103.16716, 2204.08396, 2412.19437): experts do not compete
    for a score as they do in a softmax. DeepSeek-V3 is this gate with `groups`, `bias`, `renormalise` and
    `scale`.
    """

    def scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid()

    def probabilities(self, scores_TE: Tensor) -> Tensor:
        """Return scores as shares of their sum (DeepSeek-V3's balance loss)."""
        tiny = torch.finfo(scores_TE.dtype).tiny  # sigmoids of very negative logits are all zero
        return scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + tiny)


class NoisyGate(SoftmaxGate):
    """The softmax gate with learnt noise on its logits: Shazeer et al. 2017 (arXiv 1701.06538), GShard.

    logits = x Wg + n * softplus(x Wn) with n ~ N(0, 1): how much noise an expert's logit gets is learnt.
    Choice, weights, balance and z-loss all see the noisy logits in training; in evaluation there is none.
    place: unique among the model's noisy gates, the layer's number for example. With `Tokens.keys` the noise
    of a token depends on run, place, sample and position only, hence neither on microbatches nor on ranks.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, place: int = 0, **options: Any
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        # Zero as in Shazeer et al.: every logit starts with the same spread, softplus(0) = 0.69.
        self.noise_weight = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.place = FIRST_PLACE + place

    def logits(self, x_TM: Tensor, tokens: Tokens) -> Tensor:
        clean_TE = super().logits(x_TM, tokens)
        if not self.training or tokens.clean:
            return clean_TE
        spread_TE = F.softplus(x_TM @ self.noise_weight.to(x_TM.dtype).t())
        if tokens.keys is None:
            noise_TE = torch.randn_like(clean_TE)
        else:
            noise_BLE = normal(tokens.by_sample(clean_TE).shape, self.place, tokens.keys)
            noise_TE = noise_BLE.to(clean_TE).view_as(clean_TE)
        return clean_TE + noise_TE * spread_TE
