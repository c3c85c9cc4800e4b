"""Products of rows that are sorted by expert with one matrix per expert, and their weight gradients.

Shapes: R or n rows, N groups, M hidden size, H expert hidden size, K width of a matrix, E local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import accumulate
from math import gcd
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.device import device_of, on_device
from penstock.routing.routes import GroupSizes

# ---- one product, by whichever of PyTorch's libraries is the fastest for it ------------------------------
#
# On AMD processors MKL multiplies eight float32 numbers at a time where oneDNN takes sixteen: on a
# fifth-generation EPYC that makes oneDNN 2.2 times as fast. On other processors the two are alike, and MKL
# does not have to generate code for shapes that it has not met.


LARGE = 1 << 26
"""Number of multiplications from which oneDNN takes less time than MKL although it generates code first: it
does so for every new number of rows, hence in every step of dropless routing."""

ROUND = 64
"""Rows are filled up with zeros to a multiple of this number: oneDNN keeps the code of a thousand shapes."""


def multiply(left_nK: Tensor, right_KH: Tensor, out_nH: Tensor, *, add: bool = False) -> None:
    """Write left times right into `out`, or add it. `out` may be of a wider type than the factors."""
    if is_for_onednn(left_nK.shape[0], right_KH):
        (n, inner), right_HK = left_nK.shape, right_KH.t()
        if n % ROUND or inner % ROUND:
            left_nK = F.pad(left_nK, (0, -inner % ROUND, 0, -n % ROUND))
            right_HK = F.pad(right_HK, (0, -inner % ROUND))
        made_nH: Tensor = torch.ops.mkldnn._linear_pointwise(left_nK, right_HK, None, "none", [], "")
        put(made_nH[:n], out_nH, add=add)
    elif out_nH.dtype != left_nK.dtype:
        put(torch.mm(left_nK, right_KH), out_nH, add=add)
    elif add:
        out_nH.addmm_(left_nK, right_KH)
    else:
        torch.mm(left_nK, right_KH, out=out_nH)


def put(made: Tensor, out: Tensor, *, add: bool) -> None:
    """Copy `made` into `out`, or add it to `out`."""
    if add:
        out.add_(made)
    else:
        out.copy_(made)


def is_for_onednn(rows: int, right_KH: Tensor) -> bool:
    """Return whether oneDNN is the faster library for a product of this number of rows with a matrix."""
    large = rows * right_KH.shape[-2] * right_KH.shape[-1] >= LARGE
    return large and right_KH.dtype == torch.float32 and device_of(right_KH).is_cpu and onednn_is_faster()


@cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN generates the faster float32 code on this machine."""
    processor = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and "AVX512" in torch.backends.cpu.get_cpu_capability()
        and processor.exists()
        and "AuthenticAMD" in processor.read_text(encoding="utf-8")
    )


# ---- sizes of groups of rows: numbers on the host, which products and permutations also need on the device


def ends_of(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return where each group ends, int32 [N], as `torch.nn.functional.grouped_mm` reads it.

    Whoever multiplies with the same `GroupSizes` several times (a SwiGLU expert has three matrices, backward
    and a second run of forward multiply again) copies the ends once.
    """
    kept = sizes if isinstance(sizes, GroupSizes) else GroupSizes(sizes)
    if kept.ends is None or kept.ends.device != device:
        kept.ends = on_device(list(accumulate(kept)), device, torch.int32)
    ends: Tensor = kept.ends
    return ends


VIEWS = 16
"""Blocks from which a device gathers rows by index: a view and its node in autograd cost the host some
microseconds."""


def is_for_views(rows: Tensor, blocks: int) -> bool:
    """Return whether so many blocks are put in order as views that are concatenated, and not by index."""
    return not device_of(rows).is_gpu or blocks < VIEWS


def reordered(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return blocks of rows in another order, in one copy.

    On a CPU the blocks are views that are concatenated: they are copied as wholes. A device gathers rows by
    an index, made there from two numbers per block: five launches, where views take two or three per block.

    Args:
        rows: [R, ...].
        sizes: The rows of every block, as they lie.
        order: The block that comes first, second, ...; each block once, those without rows may be left out.
    """
    if is_for_views(rows, len(order)):
        blocks = rows.split(list(sizes))
        return torch.cat([blocks[block] for block in order])
    starts, lengths = list(accumulate(sizes, initial=0)), [sizes[block] for block in order]
    goes_to = dict(zip(order, accumulate(lengths, initial=0), strict=False))
    ahead = [starts[block] - goes_to[block] for block in order]
    there = [goes_to.get(block, 0) - starts[block] for block in range(len(sizes))]
    total = sum(lengths)
    here_R = torch.arange(total, device=rows.device)

    def moved(lengths: Sequence[int], by: Sequence[int]) -> Tensor:
        """Return the number of every row plus that of its block."""
        pairs = on_device([lengths, by], rows.device)
        return here_R + torch.repeat_interleave(pairs[1], pairs[0], output_size=total)

    gathered: Tensor = _Gathered.apply(rows, moved(lengths, ahead), moved(sizes, there))
    return gathered


class _Gathered(torch.autograd.Function):
    """Rows by index. Its backward gathers by the inverse; that of `index_select` would add, row by row."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, rows: Tensor, index_R: Tensor, inverse_R: Tensor
    ) -> Tensor:
        ctx.inverse_R = inverse_R  # type: ignore[attr-defined]  # integers that nothing else changes
        return rows.index_select(0, index_R)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.inverse_R), None, None  # type: ignore[attr-defined]


# ---- matrix products of rows that are sorted by expert, with one weight matrix per expert -----------------


Product = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""Multiplies rows [R, M] by weights [E, M, H], given the rows per expert; returns [R, H]."""

Compute = Callable[[Tensor, Sequence[int], Product], Tensor]
"""What experts do with rows [R, M] that are sorted by expert, given the rows of each; returns [R, M]."""

ROW_ALIGNMENT_BYTES = 16
GROUPED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHED = 1 << 24
"""Number of weights that still fit into a processor's cache after they have been cast to another type."""
SMALL = 1 << 17
"""Number of weights up to which one more pass over them costs a processor less than Python's calls of a
product for every expert."""


def grouped_product(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
    """Multiply the rows of every expert by its weight matrix.

    Equal sizes become one batched product, uneven ones PyTorch's grouped product, which reads on the device
    where experts' rows end. What the grouped product does not take (float64, rows that are not a multiple of
    16 bytes) is multiplied expert by expert, and so is everything on GPUs for which PyTorch has no grouped
    kernel: its substitute copies the ends to the host and waits, while sizes are known here. On a CPU large
    products go expert by expert, too: each by the fastest library, and with a weight cast while in the cache.
    To `torch.compile` the whole product is one operator, for any number of rows.

    Args:
        sizes: Rows per expert.

    Returns:
        [R, H], in the type of the rows, or autocast's under autocast.
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
        out_RH: Tensor = _Product.apply(rows_RM, weight_EMH, sizes, _by_expert)
        return out_RH
    weight_EMH = weight_EMH.to(rows_RM.dtype)
    if len(set(sizes)) == 1:
        return torch.bmm(rows_RM.unflatten(0, (len(sizes), sizes[0])), weight_EMH).flatten(0, 1)
    if rows_RM.dtype in GROUPED_TYPES and _aligned(weight_EMH):
        if torch.is_grad_enabled() and not device_of(rows_RM).is_cpu:
            product_RH: Tensor = _Product.apply(rows_RM, weight_EMH, sizes, _by_kernel)
            return product_RH
        product_RH = _by_kernel(rows_RM, weight_EMH, sizes)
        if product_RH.requires_grad:
            product_RH.register_hook(Tensor.contiguous)  # its backward refuses a broadcast gradient
        return product_RH
    parts = rows_RM.split(list(sizes))
    return torch.cat([part @ weight for part, weight in zip(parts, weight_EMH.unbind(0), strict=True)])


def autocast(rows_RM: Tensor) -> Tensor:
    """Cast rows as autocast does for a matrix product: PyTorch's autocast does not know grouped products."""
    return rows_RM.to(computing_type(rows_RM))


def computing_type(factor: Tensor) -> torch.dtype:
    """Return the type in which products of such a tensor are computed here."""
    kind = factor.device.type
    if factor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return factor.dtype
    return torch.get_autocast_dtype(kind)


def as_cast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products there are computed in the type of their factors.

    A backward pass that is begun under autocast has it on, and on a device's own thread of autograd in the
    device's default type, which is not the one of the forward pass.
    """
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _weight_gradient_by_kernel(rows_RM: Tensor, grad_RH: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """Return rows_e^T grad_e of every expert where that is one call; else None."""
    size = len(sizes) * rows_RM.shape[1] * grad_RH.shape[1]
    small = device_of(rows_RM).is_cpu and size <= SMALL and rows_RM.dtype in GROUPED_TYPES
    in_one_call = len(set(sizes)) > 1 and (small or has_grouped_kernel(rows_RM))
    if not (in_one_call and _aligned(rows_RM) and _aligned(grad_RH)):
        return None
    made_EMH = F.grouped_mm(rows_RM.t(), grad_RH, offs=ends_of(sizes, rows_RM.device))
    for expert, size in enumerate(sizes):
        if size == 0:  # a sum over no rows, for which sm100's kernel leaves what was in its registers
            made_EMH[expert].zero_()
    return made_EMH


def weight_gradient(
    rows_RM: Tensor, grad_RH: Tensor, sizes: Sequence[int], total_EMH: Tensor, *, add: bool
) -> None:
    """Write rows_e^T grad_e of every expert into `total`, or add it in place.

    Where there is a grouped kernel, uneven sizes are one launch too: the rows are the dimension that is
    summed over. Small weights are one call on a CPU.

    Args:
        sizes: Rows per expert.
        add: Whether to add to what `total_EMH` has.
    """
    made_EMH = _weight_gradient_by_kernel(rows_RM, grad_RH, sizes)
    if made_EMH is not None:
        put(made_EMH, total_EMH, add=add)
        return
    even = len(set(sizes)) == 1
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


class _Product(torch.autograd.Function):
    """A grouped product whose weight gradient is `weight_gradient`, where autograd makes it.

    multiplied: computes the product.
    """

    @staticmethod
    def forward(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int], multiplied: Product) -> Tensor:
        return multiplied(rows_RM, weight_EMH, sizes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs[:3], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()  # where the gradients are to be differentiated, too
        weight_gradient_of = _differentiable_weight_gradient if again else _weight_gradient_of
        return *_gradients_by(product_of_cast, weight_gradient_of, ctx, grads[0]), None


def _differentiable_weight_gradient(
    rows_RM: Tensor, grad_RH: Tensor, weight_EMH: Tensor, sizes: Sequence[int]
) -> Tensor:
    parts = zip(rows_RM.split(list(sizes)), grad_RH.split(list(sizes)), strict=True)
    return torch.stack([part_RM.t() @ part_RH for part_RM, part_RH in parts]).to(weight_EMH.dtype)


def _by_kernel(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
    return F.grouped_mm(rows_RM, weight_EMH, offs=ends_of(sizes, rows_RM.device))


def _by_expert(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
    """Multiply straight to the places in the result; no parts are concatenated afterwards."""
    out_RH = rows_RM.new_empty(rows_RM.shape[0], weight_EMH.shape[2])
    parts = zip(rows_RM.split(list(sizes)), weight_EMH.unbind(), out_RH.split(list(sizes)), strict=True)
    for part_RM, weight_MH, part_RH in parts:
        if len(part_RM):
            multiply(part_RM, weight_MH.to(rows_RM.dtype), part_RH)
    return out_RH


def _weight_gradient_of(
    rows_RM: Tensor,
    grad_RH: Tensor,
    weight_EMH: Tensor,
    sizes: Sequence[int],
    memory_format: torch.memory_format = torch.preserve_format,  # autograd takes over what lies as weights do
) -> Tensor:
    lies_so = weight_EMH.dtype == rows_RM.dtype and weight_EMH.is_contiguous()
    if lies_so and (made_EMH := _weight_gradient_by_kernel(rows_RM, grad_RH, sizes)) is not None:
        return made_EMH  # a copy would be as much again as all experts of a rank
    total_EMH = torch.empty_like(weight_EMH, memory_format=memory_format)
    weight_gradient(rows_RM, grad_RH, sizes, total_EMH, add=False)
    return total_EMH


def _gradients_by(
    product: Product, weight_gradient_of: Callable[..., Tensor], ctx: Any, grad_RH: Tensor
) -> tuple[Tensor | None, Tensor | None, None]:
    (rows_RM, weight_EMH), grad_RH = ctx.saved_tensors, grad_RH.contiguous()
    grad_rows = grad_weight = None
    with as_cast(grad_RH.device):
        if ctx.needs_input_grad[0]:
            grad_rows = product(grad_RH, weight_EMH.transpose(1, 2), ctx.sizes)
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient_of(rows_RM, grad_RH, weight_EMH, ctx.sizes)
    return grad_rows, grad_weight, None


# The compiler sees operators: it knows neither grouped products of float32 nor the fastest library here.


_as_operator = torch.library.custom_op(
    "penstock::grouped_product",
    _multiplied,
    mutates_args=(),
    schema="(Tensor rows, Tensor weight, SymInt[] sizes) -> Tensor",
)
_weight_gradient_as_operator = torch.library.custom_op(
    "penstock::grouped_weight_gradient",
    partial(_weight_gradient_of, memory_format=torch.contiguous_format),
    mutates_args=(),
    schema="(Tensor rows, Tensor grad, Tensor weight, SymInt[] sizes) -> Tensor",
)


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


_as_operator.register_autograd(
    partial(_gradients_by, _as_operator, _weight_gradient_as_operator), setup_context=_save
)


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


# ---- experts' weight gradients: computed together with the input gradients, or deferred -------------------
#
# Nothing but the update of an expert needs its weight gradient, so a schedule may use it to fill a bubble.
# In either case it is added to `weight.grad` in place: a separate gradient would be written and read once
# more. Only a weight that is a parameter without hooks, or such a parameter with its matrices transposed,
# is treated so; any other gets its gradient from autograd, as does one that has received a hook since
# forward.


class ComputeCopies:
    """Weights in the type in which a step computes: one copy of each, for all its products.

    Without it every slice of every microbatch casts all local experts, and autograd keeps each cast for
    backward: with 4 microbatches of 2 slices eight copies of two bytes per weight. One costs two bytes per
    weight until the step ends, and one pass over the weights.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[int, Tensor]] = {}

    def of(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return the weight in this type, without its history; made again if the weight has changed."""
        if weight.dtype == dtype:
            return weight.detach()
        version, copy = self._copies.get(id(weight), (-1, None))
        if copy is None or version != weight._version or copy.dtype != dtype:
            copy = weight.detach().to(dtype)
            self._copies[id(weight)] = weight._version, copy
        return copy


class AutogradWeights:
    """Weight gradients that come with the input gradients.

    Attributes:
        copies: The copies of weights that a step keeps; None: it keeps none.
    """

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

    Args:
        at_once: Ids of weights that cannot wait, since their gradients are reduced before this layer's.
        copies: The copies of weights that a step keeps; None: it keeps none.
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
        parameter: nn.Parameter,
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
        with as_cast(grad_RH.device):
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
    # The parameter whose matrices these are, as they are or transposed; else the weight itself.
    parameter, base = weight_EMH, weight_EMH._base
    if base is not None and base.dim() == 3 and base.numel() == weight_EMH.numel():
        turned = base.transpose(1, 2)
        if (turned.shape, turned.stride()) == (weight_EMH.shape, weight_EMH.stride()):
            parameter = base
    # A view or a computed weight is gone after its product, and with it what a copy would be known by.
    if not isinstance(parameter, nn.Parameter) or _has_hooks(parameter):
        return product_of_cast(rows_RM, weight_EMH, sizes)
    if not parameter.requires_grad:  # a copy without its history serves as well
        kept = _to_compute_with(weight_EMH, parameter, rows_RM.dtype, store.copies)
        return product_of_cast(rows_RM, kept, sizes)
    out_RH: Tensor = _WeightApart.apply(rows_RM, weight_EMH, sizes, store, parameter)
    return out_RH


def _to_compute_with(
    weight_EMH: Tensor, parameter: nn.Parameter, dtype: torch.dtype, copies: ComputeCopies | None
) -> Tensor:
    """Return the weight that products read, without history. parameter: the weight, or its matrices
    transposed."""
    if copies is None:
        return weight_EMH.detach()
    copy = copies.of(parameter, dtype)
    return copy if parameter is weight_EMH else copy.transpose(1, 2)


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _accumulate(rows_RM: Tensor, grad_RH: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> None:
    """Add rows_e^T grad_e to weight.grad[e] of every expert, unless the weight was frozen after forward.

    Where autograd records nothing.
    """
    if not weight_EMH.requires_grad:
        return
    first = weight_EMH.grad is None
    if weight_EMH.grad is None:
        weight_EMH.grad = torch.empty_like(weight_EMH, dtype=weight_EMH.grad_dtype)
    weight_gradient(rows_RM, grad_RH, sizes, weight_EMH.grad, add=not first)
