"""The cosine gate: X-MoE, "On the representation collapse of sparse mixture of experts" (arXiv 2204.09179).

logits = cos(W x, e) / temperature in a space of few dimensions, so that the length of a hidden state has no
effect and hidden states are not drawn towards the experts' vectors.
Shapes: T tokens, M hidden size, P size of the projection, E experts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.moe.gates.base import TokenGate, linear_weight
from penstock.moe.tokens import Tokens

INITIAL_TEMPERATURE = 0.07
SHORTEST = 1e-4
"""Vectors shorter than this are not stretched to length one: the gradient of a zero vector stays finite."""


class CosineGate(TokenGate):
    """Softmax over cosines between projected tokens and expert vectors; the temperature is learnt.

    hidden_size: M. proj_size: P. The other parameters are those of TokenGate.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, proj_size: int, **options: Any
    ) -> None:
        super().__init__(num_experts, top_k, **options)
        self.projection = linear_weight(proj_size, hidden_size)
        self.weight = linear_weight(num_experts, proj_size)
        # The logarithm is learnt, so the temperature is positive whatever the optimiser does.
        self.log_temperature = nn.Parameter(torch.tensor(math.log(INITIAL_TEMPERATURE)))

    def logits(self, x_TM: Tensor, tokens: Tokens) -> Tensor:
        del tokens
        token_TP = F.normalize(x_TM @ self.projection.to(x_TM.dtype).t(), dim=1, eps=SHORTEST)
        expert_EP = F.normalize(self.weight.to(x_TM.dtype), dim=1, eps=SHORTEST)
        return token_TP @ expert_EP.t() / self.log_temperature.to(x_TM.dtype).exp()
