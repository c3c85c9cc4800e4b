"""Experts' weight gradients: computed together with the input gradients, or deferred.

Nothing but the update of an expert needs its weight gradient, so a schedule may use it to fill a bubble. In
either case it is added to `weight.grad` in place: a separate gradient would be written and read once more.
Only a weight that is a parameter without hooks, or such a parameter with its matrices transposed, is treated
so; any other gets its gradient from autograd, as does one that has received a hook since forward.
Shapes: R rows, M and H widths of a weight matrix, E local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.moe.experts.product import CACHED, autocast, product_of_cast, weight_gradient


class ComputeCopies:
    """Weights in the type in which a step computes: one copy of each, for all its products.

    Without it every slice of every microbatch casts all local experts, and autograd keeps each cast for
    backward: with 4 microbatches of 2 slices eight copies of two bytes per weight. One costs two bytes per
    weight until the step ends, and one pass over the weights.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[int, Tensor]] = {}

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in this type, without its history; made again if the weight has changed."""
        if weight.dtype == dtype:
            return weight.detach()
        version, copy = self._copies.get(id(weight), (-1, None))
        if copy is None or version != weight._version or copy.dtype != dtype:
            copy = weight.detach().to(dtype)
            self._copies[id(weight)] = weight._version, copy
        return copy


class AutogradWeights:
    """Weight gradients that come with the input gradients. copies: of weights, where a step keeps them."""

    def __init__(self, copies: ComputeCopies | None = None) -> None:
        self.copies = copies

    def product(self, rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
        rows_RM = autocast(rows_RM)
        # Autograd keeps the copy of a weight that it casts, which is faster for small ones that are.
        cast = rows_RM.dtype != weight_EMH.dtype
        if self.copies is None and cast and weight_EMH.numel() <= CACHED:
            return product_of_cast(rows_RM, weight_EMH, sizes)
        return _product(rows_RM, weight_EMH, sizes, self)

    def take(self, rows_RM: Tensor, grad_RH: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> None:
        """Add the weight gradient of these rows and output gradients to `weight.grad`, in backward."""
        _accumulate(rows_RM, grad_RH, weight_EMH, sizes)

    def compute(self) -> None:
        """Do nothing: no gradient has been deferred."""


class WeightGradients:
    """Weight gradients that are deferred: their factors are kept until `compute` is called.

    at_once: ids of weights that cannot wait, since their gradients are reduced before this layer's. copies:
    of weights, where a step keeps them.
    """

    def __init__(self, at_once: frozenset[int] = frozenset(), copies: ComputeCopies | None = None) -> None:
        self._at_once, self.copies = at_once, copies
        self._pending: list[tuple[Tensor, Tensor, Tensor, Sequence[int]]] = []

    def product(self, rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
        return _product(autocast(rows_RM), weight_EMH, sizes, self)

    def take(self, rows_RM: Tensor, grad_RH: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> None:
        """Keep the factors of a weight gradient, in backward; those of `at_once` are used immediately."""
        if id(weight_EMH) in self._at_once:
            _accumulate(rows_RM, grad_RH, weight_EMH, sizes)
        else:
            self._pending.append((rows_RM, grad_RH, weight_EMH, sizes))

    @torch.no_grad()
    def compute(self) -> None:
        """Add all deferred gradients to the weights' gradients."""
        while self._pending:
            _accumulate(*self._pending.pop(0))


class _WeightApart(torch.autograd.Function):
    """A grouped product whose backward computes the gradient of the rows only.

    parameter: whose gradient is left to `store`: the weight itself, or its matrices transposed (turned).
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_RM: Tensor,
        weight_EMH: Tensor,
        sizes: Sequence[int],
        store: AutogradWeights | WeightGradients,
        parameter: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows_RM)
        ctx.weight_EMH = _to_compute_with(weight_EMH, parameter, rows_RM.dtype, store.copies)
        ctx.sizes, ctx.store = sizes, store
        ctx.parameter, ctx.version = parameter, parameter._version
        ctx.turned = parameter is not weight_EMH
        return product_of_cast(rows_RM, ctx.weight_EMH, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # as autograd does for a pass that is to be differentiated again
            raise RuntimeError("weight gradients that are left to a step cannot be differentiated again")
        (rows_RM,), grad_RH = ctx.saved_tensors, grads[0].contiguous()
        if ctx.parameter._version != ctx.version:  # autograd checks the tensors that it saves in this way
            raise RuntimeError(
                f"experts' weights {list(ctx.weight_EMH.shape)} were changed in place between forward and "
                "backward, so gradients would be those of neither: update them after backward, or compute "
                "the loss again"
            )
        grad_EMH = None
        if _has_hooks(ctx.parameter):
            grad_EMH = ctx.parameter.new_empty(ctx.weight_EMH.shape)
            weight_gradient(rows_RM, grad_RH, ctx.sizes, grad_EMH, add=False)
        else:
            factors = (grad_RH, rows_RM) if ctx.turned else (rows_RM, grad_RH)
            ctx.store.take(*factors, ctx.parameter, ctx.sizes)
        grad_RM = product_of_cast(grad_RH, ctx.weight_EMH.transpose(1, 2), ctx.sizes)
        return grad_RM, grad_EMH, None, None, None


def _product(
    rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int], store: AutogradWeights | WeightGradients
) -> Tensor:
    parameter = _parameter_of(weight_EMH)
    if parameter.is_leaf and not parameter.requires_grad:  # frozen: a copy without its history serves as well
        kept = _to_compute_with(weight_EMH, parameter, rows_RM.dtype, store.copies)
        return product_of_cast(rows_RM, kept, sizes)
    if not parameter.is_leaf or _has_hooks(parameter):
        return product_of_cast(rows_RM, weight_EMH, sizes)
    out_RH: Tensor = _WeightApart.apply(rows_RM, weight_EMH, sizes, store, parameter)
    return out_RH


def _to_compute_with(
    weight_EMH: Tensor, parameter: Tensor, dtype: torch.dtype, copies: ComputeCopies | None
) -> Tensor:
    """Return the weight that products read, without history. parameter: the weight, or its matrices
    transposed."""
    if copies is None:
        return weight_EMH.detach()
    copy = copies.of(parameter, dtype)
    return copy if parameter is weight_EMH else copy.transpose(1, 2)


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _parameter_of(weight_EMH: Tensor) -> Tensor:
    """Return the parameter whose matrices these are, as they are or transposed; else the weight itself."""
    base = weight_EMH._base
    if base is None or base.dim() != 3 or base.numel() != weight_EMH.numel():
        return weight_EMH
    turned = base.transpose(1, 2)
    same = (turned.shape, turned.stride()) == (weight_EMH.shape, weight_EMH.stride())
    return base if same else weight_EMH


def _accumulate(rows_RM: Tensor, grad_RH: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> None:
    """Add rows_e^T grad_e to weight.grad[e] of every expert, unless the weight was frozen after forward.

    Where autograd records nothing.
    """
    if not weight_EMH.requires_grad:
        return
    first = weight_EMH.grad is None
    if weight_EMH.grad is None:
        weight_EMH.grad = torch.empty_like(weight_EMH)
    weight_gradient(rows_RM, grad_RH, sizes, weight_EMH.grad, add=not first)
