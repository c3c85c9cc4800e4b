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


class Shares:
    """This rank's share of the experts in some modules: consecutive ones, which are views of all until it
    is settled that the others go.
    """

    def __init__(self, modules: Iterable[nn.Module], held: Sequence[int], num_experts: int) -> None:
        found = {id(p): p for experts in modules for p in experts.parameters()}.values()
        cut = len(held) < num_experts
        self._whole = [(p, p.data, p.grad) for p in found if cut]
        for parameter, whole, _ in self._whole:
            share = whole.unflatten(0, (num_experts, -1))[held[0] : held[-1] + 1]
            parameter.grad = None  # of another shape
            parameter.data = share.flatten(0, 1)  # an optimizer may know the parameter

    def settle(self) -> None:
        """Give up the others: what stays gets memory of its own."""
        while self._whole:  # one after the other, so that no two copies are held of more than one
            parameter = self._whole.pop()[0]
            parameter.data = parameter.data.clone()

    def undo(self) -> None:
        """Give the modules all experts again, and their gradients."""
        for parameter, whole, grad in self._whole:
            parameter.data, parameter.grad = whole, grad
        self._whole = []


def keep_shares(modules: Iterable[nn.Module], held: Sequence[int], num_experts: int) -> None:
    """Of every module keep these experts of all, which are consecutive, in memory of their own."""
    Shares(modules, held, num_experts).settle()
