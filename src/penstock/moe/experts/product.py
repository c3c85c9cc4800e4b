"""Matrix products of rows that are sorted by expert, with one weight matrix per expert.

Shapes: R rows, M hidden size, H expert hidden size, E local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.device import device_of
from penstock.moe.experts.multiply import is_for_onednn, multiply, put
from penstock.moe.sizes import ends_of

Product = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""Multiplies rows [R, M] by weights [E, M, H], given the rows per expert; returns [R, H]."""

ROW_ALIGNMENT_BYTES = 16
GROUPED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHED = 1 << 24
"""Number of weights that still fit into a processor's cache after they have been cast to another type."""
SMALL = 1 << 17
"""Number of weights up to which one more pass over them costs a processor less than Python's calls of a
product for every expert."""


def grouped_product(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
    """Multiply the rows of every expert by its weight matrix. sizes: rows per expert. Returns [R, H].

    Equal sizes become one batched product, uneven ones PyTorch's grouped product, which reads on the device
    where experts' rows end. What the grouped product does not take (float64, rows that are not a multiple of
    16 bytes) is multiplied expert by expert, and so is everything on GPUs for which PyTorch has no grouped
    kernel: its substitute copies the ends to the host and waits, while sizes are known here. On a CPU large
    products go expert by expert, too: each by the fastest library, and with a weight cast while in the cache.
    The result has the type of the rows, or autocast's under autocast. To `torch.compile` the whole product is
    one operator, for any number of rows.
    """
    return product_of_cast(autocast(rows_RM), weight_EMH, sizes)


def product_of_cast(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the grouped product of rows that have the type which they are multiplied in."""
    if torch.compiler.is_compiling():
        compiled_RH: Tensor = _as_operator(rows_RM, weight_EMH, list(sizes))
        return compiled_RH
    return _multiplied(rows_RM, weight_EMH, sizes)


def _multiplied(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
    if _expert_by_expert(rows_RM, weight_EMH, sizes):
        out_RH: Tensor = _ExpertByExpert.apply(rows_RM, weight_EMH, sizes)
        return out_RH
    weight_EMH = weight_EMH.to(rows_RM.dtype)
    if len(set(sizes)) == 1:
        return torch.bmm(rows_RM.unflatten(0, (len(sizes), sizes[0])), weight_EMH).flatten(0, 1)
    if rows_RM.dtype in GROUPED_TYPES and _aligned(weight_EMH):
        product_RH = F.grouped_mm(rows_RM, weight_EMH, offs=ends_of(sizes, rows_RM.device))
        if product_RH.requires_grad:
            product_RH.register_hook(Tensor.contiguous)  # its backward refuses a broadcast gradient
        return product_RH
    parts = rows_RM.split(list(sizes))
    return torch.cat([part @ weight for part, weight in zip(parts, weight_EMH.unbind(0), strict=True)])


def autocast(rows_RM: Tensor) -> Tensor:
    """Cast rows as autocast does for a matrix product: PyTorch's autocast does not know grouped products."""
    kind = rows_RM.device.type
    if rows_RM.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return rows_RM
    return rows_RM.to(torch.get_autocast_dtype(kind))


def weight_gradient(
    rows_RM: Tensor, grad_RH: Tensor, sizes: Sequence[int], total_EMH: Tensor, *, add: bool
) -> None:
    """Write rows_e^T grad_e of every expert into `total`, or add it in place.

    Where there is a grouped kernel, uneven sizes are one launch too: the rows are the dimension that is
    summed over. Small weights are one call on a CPU.
    """
    even = len(set(sizes)) == 1
    small = device_of(rows_RM).is_cpu and total_EMH.numel() <= SMALL and rows_RM.dtype in GROUPED_TYPES
    in_one_call = not even and (small or has_grouped_kernel(rows_RM))
    if in_one_call and _aligned(rows_RM) and _aligned(grad_RH):
        made_EMH = F.grouped_mm(rows_RM.t(), grad_RH, offs=ends_of(sizes, rows_RM.device))
        for expert, size in enumerate(sizes):
            if size == 0:  # a sum over no rows: whether the kernel writes it is not documented
                made_EMH[expert].zero_()
        put(made_EMH, total_EMH, add=add)
        return
    if even and not _expert_by_expert(rows_RM, total_EMH, sizes):
        shape = (len(sizes), sizes[0])
        rows_EMR, grad_ERH = rows_RM.unflatten(0, shape).transpose(1, 2), grad_RH.unflatten(0, shape)
        if total_EMH.dtype == rows_RM.dtype:
            total_EMH.baddbmm_(rows_EMR, grad_ERH, beta=int(add))  # with beta 0 `total` is not even read
        else:
            put(torch.bmm(rows_EMR, grad_ERH), total_EMH, add=add)
        return
    rows, grads = (each.split_with_sizes(list(sizes)) for each in (rows_RM, grad_RH))
    parts = zip(rows, grads, total_EMH.unbind(), strict=True)
    for part_RM, part_RH, total_MH in parts:
        if len(part_RM):
            multiply(part_RM.t(), part_RH, total_MH, add=add)
        elif not add:
            total_MH.zero_()


class _ExpertByExpert(torch.autograd.Function):
    """Products that each go straight to their place in the result; no parts are concatenated afterwards."""

    @staticmethod
    def forward(ctx: Any, rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows_RM, weight_EMH)
        ctx.sizes = sizes
        out_RH = rows_RM.new_empty(rows_RM.shape[0], weight_EMH.shape[2])
        parts = zip(rows_RM.split(list(sizes)), weight_EMH.unbind(), out_RH.split(list(sizes)), strict=True)
        for part_RM, weight_MH, part_RH in parts:
            if len(part_RM):
                multiply(part_RM, weight_MH.to(rows_RM.dtype), part_RH)
        return out_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (rows_RM, weight_EMH), grad_RH = ctx.saved_tensors, grads[0].contiguous()
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = grouped_product(grad_RH, weight_EMH.transpose(1, 2), ctx.sizes)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight_EMH)
            weight_gradient(rows_RM, grad_RH, ctx.sizes, grad_weight, add=False)
        return grad_rows, grad_weight, None


# The compiler sees operators: it knows neither grouped products of float32 nor the fastest library here.


@torch.library.custom_op(
    "penstock::grouped_product",
    mutates_args=(),
    schema="(Tensor rows, Tensor weight, SymInt[] sizes) -> Tensor",
)
def _as_operator(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
    return _multiplied(rows_RM, weight_EMH, sizes)


@torch.library.custom_op(
    "penstock::grouped_weight_gradient",
    mutates_args=(),
    schema="(Tensor rows, Tensor grad, Tensor weight, SymInt[] sizes) -> Tensor",
)
def _weight_gradient_as_operator(
    rows_RM: Tensor, grad_RH: Tensor, weight_EMH: Tensor, sizes: Sequence[int]
) -> Tensor:
    made_EMH = torch.empty_like(weight_EMH, memory_format=torch.contiguous_format)
    weight_gradient(rows_RM, grad_RH, sizes, made_EMH, add=False)
    return made_EMH


@_as_operator.register_fake
def _product_like(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
    del sizes
    return rows_RM.new_empty(rows_RM.shape[0], weight_EMH.shape[2])


@_weight_gradient_as_operator.register_fake
def _gradient_like(rows_RM: Tensor, grad_RH: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
    del rows_RM, grad_RH, sizes
    return torch.empty_like(weight_EMH, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Sequence[int]], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:2])
    ctx.sizes = inputs[2]


def _gradients(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows_RM, weight_EMH = ctx.saved_tensors
    grad_RH = grad_RH.contiguous()
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = _as_operator(grad_RH, weight_EMH.transpose(1, 2), ctx.sizes)
    if ctx.needs_input_grad[1]:
        grad_weight = _weight_gradient_as_operator(rows_RM, grad_RH, weight_EMH, ctx.sizes)
    return grad_rows, grad_weight, None


_as_operator.register_autograd(_gradients, setup_context=_save)


def has_grouped_kernel(rows_RM: Tensor) -> bool:
    """Return whether PyTorch multiplies such rows with a grouped kernel on their device."""
    return device_of(rows_RM).has_grouped_kernel(rows_RM.device, rows_RM.dtype)


def _expert_by_expert(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> bool:
    if not device_of(rows_RM).is_cpu:
        return len(set(sizes)) > 1 and not has_grouped_kernel(rows_RM)
    if rows_RM.dtype != weight_EMH.dtype:
        return weight_EMH.numel() > CACHED
    return is_for_onednn(max(sizes), weight_EMH)


def _aligned(factor: Tensor) -> bool:
    return gcd(*factor.shape[1:]) * factor.element_size() % ROW_ALIGNMENT_BYTES == 0
