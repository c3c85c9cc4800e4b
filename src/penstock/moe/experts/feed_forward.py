"""Feed-forward experts: those of early MoE models, with GELU, and SwiGLU of present ones; shared experts
(DeepSeekMoE, Qwen), a network that every token passes, whatever its gate says.

Shapes: R rows, M hidden size, H expert hidden size, E local experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.moe.experts.base import ONE_SHARD, Experts, ExpertShard, StackedExperts
from penstock.moe.experts.product import Product, grouped_product

INITIAL_STD = 0.02


class FeedForwardExperts(StackedExperts):
    """Experts with matrices into a hidden width and one back; each shard has a part of that width.

    The outputs of a shard are partial sums. ffn_hidden_size: of whole experts.
    """

    inward: tuple[str, ...]

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_local_experts: int,
        shard: ExpertShard = ONE_SHARD,
    ) -> None:
        super().__init__(num_local_experts)
        self.shard = shard
        width = ffn_hidden_size // shard.size
        for name in self.inward:
            setattr(self, name, weight(num_local_experts, hidden_size, width))
        self.w_down = weight(num_local_experts, width, hidden_size)
        into, back = (hidden_size, ffn_hidden_size), (ffn_hidden_size, hidden_size)
        cut = {**{name: shard.cut(1, into) for name in self.inward}, "w_down": shard.cut(0, back)}
        self.shardings = shard.among(cut)


class GeluExperts(FeedForwardExperts):
    """Two matrices per expert with GELU between."""

    inward = ("w_up",)
    w_up: nn.Parameter

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        hidden_RH = F.gelu(product(rows_RM, self.w_up, sizes))
        return product(hidden_RH, self.w_down, sizes)


class SwiGLUExperts(FeedForwardExperts):
    """Three matrices per expert: silu(x W_gate) * (x W_up), then W_down (Mixtral)."""

    inward = ("w_gate", "w_up")
    w_gate: nn.Parameter
    w_up: nn.Parameter

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        gate_RH = F.silu(product(rows_RM, self.w_gate, sizes))
        return product(gate_RH * product(rows_RM, self.w_up, sizes), self.w_down, sizes)


def weight(experts: int, rows: int, columns: int) -> nn.Parameter:
    """Return stacked matrices [experts, rows, columns], drawn as small as a decoder's weights."""
    made = nn.Parameter(torch.empty(experts, rows, columns))
    return made if made.is_meta else nn.Parameter(nn.init.normal_(made.data, std=INITIAL_STD))


class SharedExpert(nn.Module):
    """One expert of any kind over all tokens. Several shared experts are one network of their summed width.

    It waits for no transfer: in a stack it is a task of its own that runs while rows are in transit.
    """

    def __init__(self, expert: Experts) -> None:
        super().__init__()
        self.expert = expert

    def forward(self, x_TM: Tensor) -> Tensor:
        out_TM: Tensor = self.expert(x_TM, [len(x_TM)])
        return out_TM
