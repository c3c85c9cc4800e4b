"""Whether numbers are finite: a cheap look at whole tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity; None if all numbers are finite.

    One pass over memory, and nothing is allocated. Tensors of whole numbers are finite anyway.
    """
    named = {name: each for name, each in tensors.items() if each.is_floating_point() and each.numel()}
    if not named:
        return None
    # The largest magnitude: a norm of squares could overflow where every number is finite.
    largest = torch._foreach_norm(list(named.values()), math.inf)
    finite = torch.stack([each.double().cpu() for each in largest]).isfinite().tolist()
    return next((name for name, whole in zip(named, finite, strict=True) if not whole), None)
