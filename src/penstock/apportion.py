"""Whole numbers in given proportions that sum to a given total."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


def apportion(weights: Counts, total: Counts | int) -> Counts:
    """Share `total` out in proportion to `weights` by largest remainders.

    The result is exact in integers as long as weight * total stays under 2**63.

    Args:
        weights: The proportions, [..., E], not negative.
        total: The sum of the shares, [...] or one number; 0 where all weights are 0.

    Returns:
        The shares, [..., E]. Each is its exact value rounded down or up, they sum to `total`, and of equal
        remainders the first is rounded up.
    """
    target = np.broadcast_to(np.asarray(total, dtype=np.int64), weights.shape[:-1])[..., None]
    sums = weights.sum(axis=-1, keepdims=True)
    if (sums == target).all():
        return weights.astype(np.int64)
    shares, remainders = np.divmod(weights * target, np.maximum(sums, 1))
    missing = target - shares.sum(axis=-1, keepdims=True)
    short = missing[..., 0] > 0  # only these are sorted
    largest_first = np.argsort(-remainders[short], axis=-1, kind="stable")
    rounded_up = np.arange(weights.shape[-1]) < missing[short]
    extra = np.zeros_like(largest_first)
    np.put_along_axis(extra, largest_first, rounded_up.astype(np.int64), axis=-1)
    shares[short] += extra
    return shares
