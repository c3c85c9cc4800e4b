"""Arrays of integers, and exact matrix products of them by the fast routine for floating point.

All ranks must derive the same results independently. Therefore costs are integers: a sum of integers below
2 ** 53 is exact in float64, in whatever order a library adds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def exact_product(left: Ints | Floats, right: Ints | Floats) -> Ints:
    """Return the product of two matrices of integers (int64 or float64) whose sums stay below 2 ** 53."""
    product: Ints = (left.astype(np.float64, copy=False) @ right.astype(np.float64, copy=False)).astype(
        np.int64
    )
    return product
