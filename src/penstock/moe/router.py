"""The router: which experts a token goes to, and with what weight.

Shapes: T tokens, M hidden size, E experts (total), k choices per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.moe.config import MoEConfig


@dataclass(frozen=True)
class Routing:
    """What the router decided.

    weights_Tk: weight of each choice, router precision, differentiable.
    experts_Tk: chosen experts, int64, best first.
    probability_E: sum over tokens of the gate probabilities, differentiable (for the balance loss).
    z: sum over tokens of the squared log-partition, differentiable scalar (for the z-loss).
    """

    weights_Tk: Tensor
    experts_Tk: Tensor
    probability_E: Tensor
    z: Tensor


class TopKRouter(nn.Module):
    """Softmax over experts, the k largest probabilities. Works in float32, whatever the model's precision."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.top_k = config.top_k
        self.renormalise = config.renormalise

    def forward(self, x_TM: Tensor) -> Routing:
        with torch.autocast(x_TM.device.type, enabled=False):
            precision = torch.promote_types(x_TM.dtype, torch.float32)
            logits_TE = x_TM.to(precision) @ self.gate.to(precision).t()
            probability_TE = logits_TE.softmax(dim=-1)
            weights_Tk, experts_Tk = probability_TE.topk(self.top_k, dim=-1)
            if self.renormalise:
                weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
            z = logits_TE.logsumexp(dim=-1).square().sum()
        return Routing(weights_Tk, experts_Tk, probability_TE.sum(dim=0), z)
