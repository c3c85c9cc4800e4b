"""Checks whether numbers are finite, by one cheap pass over whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor

MOST_SQUARED: Final = math.sqrt(torch.finfo(torch.float32).max)
"""The largest number whose square is one in float32: norms of larger ones are zero or infinite."""


NOT_FINITE: Final = "holds numbers that are not finite"


def first_not_finite(
    tensors: Iterable[tuple[str, Tensor]], most: Callable[[str], float] = lambda name: math.inf
) -> str | None:
    """Return the name of the first tensor with a NaN, an infinity or a number above its `most`, or None.

    It takes one pass over memory and allocates nothing. Integer tensors are always finite.
    """
    found = [(name, each) for name, each in tensors if each.is_floating_point() and each.numel()]
    if not found:
        return None
    names, numbers = zip(*found, strict=True)
    # The largest magnitude is taken, since a norm of squares could overflow although every number is finite.
    largest = torch._foreach_norm(list(numbers), math.inf)
    sizes = torch.stack([each.double().cpu() for each in largest])
    limits = torch.tensor([most(name) for name in names], dtype=torch.float64)
    finite = (sizes.isfinite() & (sizes <= limits)).tolist()
    return next((name for name, whole in zip(names, finite, strict=True) if not whole), None)
