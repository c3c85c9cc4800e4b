"""Sizes of pieces: how batches, tokens and buffers are cut, and how many slots an expert has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt


@lru_cache(maxsize=4096)  # a search cuts a few sizes hundreds of thousands of times
def split_sizes(total: int, pieces: int) -> tuple[int, ...]:
    """Return sizes of `pieces` nearly equal pieces, larger ones first (as `torch.tensor_split` cuts)."""
    small, rest = divmod(total, pieces)
    return tuple(small + (i < rest) for i in range(pieces))


def part_sizes(total: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Cut `total` in the proportions of `parts`; equal parts are cut as `split_sizes` cuts."""
    if len(set(parts)) <= 1:
        return split_sizes(total, len(parts))
    whole = sum(parts)
    ends = [total * through // whole for through in accumulate(parts)]
    return tuple(end - start for start, end in pairwise([0, *ends]))


@lru_cache(maxsize=4096)
def capacity_slots(tokens: int, num_experts: int, top_k: int, capacity_factor: float, minimum: int) -> int:
    """Return slots per expert for `tokens` of one rank: ceil(f * k * tokens / E), at least `minimum`."""
    exact = Fraction(str(capacity_factor)) * top_k * tokens / num_experts  # 1.1 is 11/10, not its float
    return max(minimum, math.ceil(exact))


def int8_row_bytes(hidden_size: int) -> int:
    """Return the bytes of an int8 row: one per number and a float32 scale, padded to whole words."""
    return 4 * (-(-hidden_size // 4) + 1)


def compressed_row_bytes(form: str, hidden_size: int) -> int:
    """Return the bytes of a row as bfloat16 or as int8."""
    return 2 * hidden_size if form == "bfloat16" else int8_row_bytes(hidden_size)


# ---- arrays of integers, and exact matrix products of them by the fast routine for floating point ---------
#
# All ranks must derive the same results independently. Therefore costs are integers: a sum of integers below
# 2 ** 53 is exact in float64, in whatever order a library adds.


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def exact_product(left: Ints | Floats, right: Ints | Floats) -> Ints:
    """Return the product of two matrices of integers (int64 or float64) whose sums stay below 2 ** 53."""
    product: Ints = (left.astype(np.float64, copy=False) @ right.astype(np.float64, copy=False)).astype(
        np.int64
    )
    return product
