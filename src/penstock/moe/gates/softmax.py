"""The softmax gate: GShard, Switch, Mixtral (weights renormalised), Qwen3-MoE, OLMoE (weights unchanged)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.moe.gates.base import TokenGate, linear_weight
from penstock.moe.tokens import Tokens


class SoftmaxGate(TokenGate):
    """Probabilities over all experts from one matrix; a token's choices are the k largest.

    hidden_size: M. The other parameters are those of TokenGate.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, **options: Any) -> None:
        super().__init__(num_experts, top_k, **options)
        self.weight = linear_weight(num_experts, hidden_size)

    def logits(self, x_TM: Tensor, tokens: Tokens) -> Tensor:
        del tokens
        return x_TM @ self.weight.to(x_TM.dtype).t()
