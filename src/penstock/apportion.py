"""Whole numbers that sum to a given total: in given proportions, or of items in nearly even parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

EVENNESS = 8
"""The power of parts' times whose sum is least: nearly the longest time, and of equal ones the most even."""


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


def evenly(seconds: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the numbers of consecutive items in parts of nearly the same sum, one in each at least."""
    items = len(seconds)
    sums_I = np.array([0.0, *accumulate(seconds)]) / (sum(seconds) / parts)
    from_to_II = np.triu(sums_I[None, :] - sums_I[:, None]) ** EVENNESS
    from_to_II[np.tril_indices(items + 1)] = np.inf  # no part is empty
    costs_I, cuts = from_to_II[0], list[Any]()
    for _ in range(parts - 1):
        both_II = costs_I[:, None] + from_to_II
        cuts.append(both_II.argmin(axis=0))
        costs_I = both_II.min(axis=0)
    ends = [items]
    for cut_I in reversed(cuts):
        ends.append(int(cut_I[ends[-1]]))
    return tuple(stop - first for first, stop in pairwise([0, *reversed(ends)]))
