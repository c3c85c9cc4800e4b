"""Whether tensors are the same, nearly or to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from tests.support.reference_moe import Weights


def check_close(ours: Tensor, theirs: Tensor, tolerance: float, what: str, least: float = 1e-7) -> None:
    """Relative norm of the difference; a tensor that should be zero must be zero to rounding.

    least: the norm from which on a difference is relative. Sums that cancel are rounded as their terms are.
    """
    assert ours.shape == theirs.shape, f"{what}: {ours.shape} against {theirs.shape}"
    difference, size = float((ours - theirs).double().norm()), float(theirs.double().norm())
    assert difference <= tolerance * max(size, least), f"{what}: {difference:.3g} against {size:.3g}"


def check_all_close(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    tolerance: float,
    what: str = "",
    *,
    times: float = 1.0,
    least: float = 1e-7,
) -> None:
    """Names are the same, and tensors of ours close to `times` theirs; a tolerance of 0 wants equal ones."""
    assert ours.keys() == theirs.keys(), what
    for name, tensor in theirs.items():
        assert tolerance or ours[name].dtype == tensor.dtype, f"{what} {name}"
        check_close(ours[name], times * tensor, tolerance, f"{what} {name}", least)


def digest(weights: Weights) -> str:
    """A hash of the bits of all tensors."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return total.hexdigest()
