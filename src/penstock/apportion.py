"""Whole numbers in given proportions that sum to a given total."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


def apportion(weights: Counts, total: Counts | int) -> Counts:
    """Share `total` out in proportion to `weights` by largest remainders.

    weights: [..., E], not negative. total: [...] or one number; 0 where all weights are 0. Returns [..., E]:
    every share is its exact value rounded down or up, shares sum to `total`, and of equal remainders the
    first is rounded up. Exact in integers as long as weight * total stays under 2**63.
    """
    target = np.broadcast_to(np.asarray(total, dtype=np.int64), weights.shape[:-1])[..., None]
    whole = np.maximum(weights.sum(axis=-1, keepdims=True), 1)
    shares, remainders = np.divmod(weights * target, whole)
    missing = target - shares.sum(axis=-1, keepdims=True)
    largest_first = np.argsort(-remainders, axis=-1, kind="stable")
    rounded_up = np.broadcast_to(np.arange(weights.shape[-1]) < missing, weights.shape)
    extra = np.zeros_like(shares)
    np.put_along_axis(extra, largest_first, rounded_up.astype(np.int64), axis=-1)
    return shares + extra
