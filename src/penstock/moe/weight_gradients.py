"""Experts' weight gradients, made by autograd together with the input gradients, or put off and made later.

Nothing but the update of an expert needs its weight gradient, so a schedule may use it to fill a gap.
Shapes: R rows, M and H widths of a weight matrix, E local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.moe.experts import grouped_product


class AutogradWeights:
    """Weight gradients come with the input gradients."""

    def product(self, rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
        return grouped_product(rows_RM, weight_EMH, sizes)

    def compute(self) -> None:
        """Nothing has been put off."""


class WeightGradients:
    """Remembers what weight gradients are made of until `compute` is called."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Tensor, Tensor, Sequence[int]]] = []

    def product(self, rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
        out_RH: Tensor = _PutOff.apply(rows_RM, weight_EMH, sizes, self)
        return out_RH

    def put_off(self, rows_RM: Tensor, grad_RH: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> None:
        if weight_EMH.requires_grad:
            self._pending.append((rows_RM, grad_RH, weight_EMH, sizes))

    def compute(self) -> None:
        """Add all that was put off to the weights' gradients."""
        with torch.no_grad():
            while self._pending:
                _accumulate(*self._pending.pop(0))


class _PutOff(torch.autograd.Function):
    """A grouped product whose backward makes the gradient of the rows only."""

    @staticmethod
    def forward(
        ctx: Any, rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int], store: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(rows_RM)
        ctx.weight_EMH, ctx.sizes, ctx.store = weight_EMH, sizes, store
        return grouped_product(rows_RM, weight_EMH, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rows_RM,) = ctx.saved_tensors
        grad_RH = grads[0].contiguous()
        ctx.store.put_off(rows_RM, grad_RH, ctx.weight_EMH, ctx.sizes)
        return grouped_product(grad_RH, ctx.weight_EMH.transpose(1, 2), ctx.sizes), None, None, None


def _accumulate(rows_RM: Tensor, grad_RH: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> None:
    """weight.grad[e] += rows_e^T grad_e for every expert."""
    if weight_EMH.grad is None:
        weight_EMH.grad = torch.zeros_like(weight_EMH)
    rows_RM, grad_RH = rows_RM.to(weight_EMH.dtype), grad_RH.to(weight_EMH.dtype)
    if len(set(sizes)) == 1:
        shape = (len(sizes), sizes[0])
        rows_ERM, grad_ERH = rows_RM.unflatten(0, shape), grad_RH.unflatten(0, shape)
        weight_EMH.grad.baddbmm_(rows_ERM.transpose(1, 2), grad_ERH)
        return
    parts = zip(weight_EMH.grad.unbind(), rows_RM.split(list(sizes)), grad_RH.split(list(sizes)), strict=True)
    for total_MH, part_RM, part_RH in parts:
        total_MH.addmm_(part_RM.t(), part_RH)  # adds in place: no gradient of its own is ever allocated
