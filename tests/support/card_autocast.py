"""Autocast for the stand-in for a GPU, with PyTorch's rules for CUDA, written in Python.

Products compute in the lower precision, sums and norms in float32, and the cast of a parameter is kept until
the outermost context is left, as PyTorch's own cache does it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

LOWER = ("linear", "matmul", "mm", "mv", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention")
"""Operations in the lower precision; of PyTorch's list, those that Penstock's models use."""

FULL = (
    *("exp", "log", "rsqrt", "pow.Tensor_Scalar", "layer_norm", "native_layer_norm", "nll_loss"),
    *("norm.Scalar", "norm.ScalarOpt_dim", "softmax.int", "log_softmax.int", "sum", "sum.dim_IntList"),
    *("cumsum", "binary_cross_entropy_with_logits", "mse_loss"),
)
"""Operations in float32."""

WIDEST = ("index_put", "scatter_add", "dot", "addcmul")
"""Operations in the widest type of what they get."""

KEY = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]  # not in torch's stubs

_casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
_clear = torch.clear_autocast_cache


def register(kind: str) -> list[Any]:
    """Give devices of this kind autocast; return what must be kept as long as it is used."""
    torch.clear_autocast_cache = _forget
    everything = torch.library.Library("_", "IMPL", KEY.name)
    everything.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", KEY.name)
    rules: tuple[tuple[tuple[str, ...], Callable[[list[Tensor]], torch.dtype]], ...] = (
        (LOWER, lambda _: torch.get_autocast_dtype(kind)),
        (FULL, lambda _: torch.float32),
        (WIDEST, lambda values: max((each.dtype for each in values), key=lambda dtype: dtype.itemsize)),
    )
    for names, choose in rules:
        for name in names:
            library.impl(name, _casting(_overload(name), choose))
    return [everything, library]


def _forget() -> None:
    _casts.clear()
    _clear()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _casting(function: Any, choose: Callable[[list[Tensor]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = [each for each in tree_leaves((args, kwargs)) if _is_cast(each)]
        without = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(KEY))
        with without:
            if not values:
                return function(*args, **kwargs)
            dtype = choose(values)
            args, kwargs = tree_map(
                lambda each: _cast(each, dtype) if _is_cast(each) else each, (args, kwargs)
            )
            return function(*args, **kwargs)

    return kernel


def _is_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    keeps = tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32
    if not (keeps and torch.is_autocast_cache_enabled()):
        return tensor.to(dtype)
    known = _casts.get(id(tensor))
    if known is None or known[0]() is not tensor:
        known = _casts[id(tensor)] = weakref.ref(tensor), tensor.to(dtype)
    return known[1]
