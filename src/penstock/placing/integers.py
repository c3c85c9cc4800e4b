"""Arrays of integers, and their products by floating point's fast routine.

Everything that ranks derive each for itself must come out the same on all of them. So costs are integers: a
sum of integers below 2 ** 53 is exact in float64, in whatever order a library adds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def exact_product(left: Ints | Floats, right: Ints | Floats) -> Ints:
    """The product of two matrices of integers, in float64 or not, whose sums stay below 2 ** 53."""
    product: Ints = (left.astype(np.float64, copy=False) @ right.astype(np.float64, copy=False)).astype(
        np.int64
    )
    return product
