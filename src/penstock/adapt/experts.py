"""A model's own experts, of which this rank keeps its share, run over rows that are sorted by expert.

Shapes: R rows, M hidden size, H width of a matrix, E local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.adapt.memory import Memory
from penstock.moe.experts.base import StackedExperts
from penstock.moe.experts.product import Product, grouped_product

TRAITS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")
"""What transformers says of experts whose weights are stacked (`use_experts_implementation`)."""


class ModelExperts(StackedExperts):
    """The experts that a module of transformers holds: two stacked matrices, perhaps with biases.

    source: the module; its parameters stay where they are and keep their names.
    """

    def __init__(self, source: nn.Module, num_local_experts: int, memory: Memory) -> None:
        super().__init__(num_local_experts)
        self.source: Any = source
        self.memory = memory

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        (out_RM,) = self.memory.run(lambda rows_RM: (self._compute(rows_RM, sizes, product),), rows_RM)
        return out_RM

    def _compute(self, rows_RM: Tensor, sizes: Sequence[int], product: Product) -> Tensor:
        source = self.source
        inner_RH = self._multiply("gate_up_proj" if source.has_gate else "up_proj", rows_RM, sizes, product)
        inner_RH = source._apply_gate(inner_RH) if source.has_gate else source.act_fn(inner_RH)
        out_RM = self._multiply("down_proj", inner_RH, sizes, product)
        if source.has_post_expert_norm:
            return source.post_expert_norm(out_RM)  # type: ignore[no-any-return]  # any module of theirs
        return out_RM

    def _multiply(self, name: str, rows_RM: Tensor, sizes: Sequence[int], product: Product) -> Tensor:
        weight_EMH = getattr(self.source, name)
        if not self.source.is_transposed:
            weight_EMH = weight_EMH.transpose(1, 2)
        out_RH = product(rows_RM, weight_EMH, sizes)
        if not self.source.has_bias:
            return out_RH
        bias_EH = getattr(self.source, f"{name}_bias")
        times_E = torch.tensor(sizes, device=bias_EH.device)
        bias_RH = bias_EH.repeat_interleave(times_E, dim=0, output_size=len(rows_RM))
        biased_RH: Tensor = out_RH + bias_RH.to(out_RH.dtype)
        return biased_RH


def check_experts(experts: nn.Module, num_experts: int, where: str) -> None:
    """Raise ValueError unless all parameters are stacked by expert, and how they multiply is known."""
    missing = [trait for trait in TRAITS if not hasattr(experts, trait)]
    if missing:
        raise ValueError(
            f"{where}: {type(experts).__name__} does not say how its experts multiply (it has no "
            f"{', '.join(missing)}): only experts with stacked weights, as transformers 5 has them, can "
            "be spread"
        )
    for name, parameter in experts.named_parameters():
        if parameter.shape[0] != num_experts:
            raise ValueError(
                f"{where}: {name} {list(parameter.shape)} is not stacked by the router's {num_experts} "
                "experts. Load the model whole, and let parallelize spread it"
            )


def keep_share(experts: nn.Module, held: Sequence[int]) -> None:
    """Keep these experts of all, in memory of their own."""
    for parameter in experts.parameters(recurse=False):
        if len(held) < len(parameter):
            kept = parameter.detach()[list(held)]  # a copy
            parameter.data, parameter.grad = kept, None  # an optimizer may know it, or another layer
