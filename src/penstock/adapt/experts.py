"""A model's own experts, of which this rank keeps its share, run over rows that are sorted by expert.

Shapes: R rows, M hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.adapt.forms import ExpertForm
from penstock.moe.experts.base import Experts, StackedExperts
from penstock.moe.experts.product import Product, grouped_product


class ModelExperts(StackedExperts):
    """The experts that a module of transformers holds.

    source: the module; its parameters stay where they are and keep their names. form: how they multiply.
    """

    def __init__(self, source: nn.Module, num_local_experts: int, form: ExpertForm) -> None:
        super().__init__(num_local_experts)
        self.source: Any = source
        self.form = form

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        return self.form.compute(self.source, rows_RM, sizes, product)

    def guests(self, slots: int) -> Experts:
        if any(len(parameter) != self.num_local_experts for parameter in self.parameters()):
            raise ValueError(
                f"{type(self.source).__name__} has several rows of a parameter for every expert, which are "
                "not moved: move no experts (placement.experts=none)"
            )
        return super().guests(slots)


def check_experts(experts: nn.Module, num_experts: int, rows: int, where: str) -> None:
    """Raise ValueError unless every parameter has so many rows for each of these experts."""
    for name, parameter in experts.named_parameters():
        if len(parameter) != num_experts * rows:
            raise ValueError(
                f"{where}: {name} {list(parameter.shape)} is not stacked by the router's {num_experts} "
                "experts. Load the model whole, and let parallelize spread it"
            )


def keep_shares(modules: Iterable[nn.Module], held: Sequence[int], num_experts: int) -> None:
    """Of every module keep these experts of all, in memory of their own."""
    for parameter in {id(p): p for experts in modules for p in experts.parameters()}.values():
        if len(held) < num_experts:
            kept = parameter.detach().unflatten(0, (num_experts, -1))[list(held)]  # a copy
            parameter.data, parameter.grad = kept.flatten(0, 1), None  # an optimizer may know it
