"""One matrix product, by whichever of PyTorch's libraries is the fastest at it.

On processors of AMD, MKL multiplies float32 numbers eight at a time where oneDNN takes sixteen: on an EPYC
of the fifth generation that makes oneDNN 2.2 times as fast. On others the two are alike, and MKL does not
have to generate code for shapes that it has not met.
Shapes: n rows, K and H widths of a matrix.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LARGE = 1 << 26
"""Multiplications that take oneDNN less time than MKL even if it generates code first: it does so for every
new number of rows, hence in every step of dropless routing."""


def multiply(left_nK: Tensor, right_KH: Tensor, out_nH: Tensor, *, add: bool = False) -> None:
    """left times right, written into `out` or added to it. `out` may be of a wider type than the factors."""
    by_onednn = is_for_onednn(left_nK.shape[0], right_KH)
    if by_onednn or out_nH.dtype != left_nK.dtype:
        put(_by_onednn(left_nK, right_KH) if by_onednn else torch.mm(left_nK, right_KH), out_nH, add=add)
    elif add:
        out_nH.addmm_(left_nK, right_KH)
    else:
        torch.mm(left_nK, right_KH, out=out_nH)


def put(made: Tensor, out: Tensor, *, add: bool) -> None:
    """`made` into `out`, or added to it."""
    if add:
        out.add_(made)
    else:
        out.copy_(made)


def is_for_onednn(rows: int, right_KH: Tensor) -> bool:
    """Whether oneDNN is the faster one for a product of this number of rows with a matrix."""
    large = rows * right_KH.shape[-2] * right_KH.shape[-1] >= LARGE
    return large and right_KH.dtype == torch.float32 and right_KH.device.type == "cpu" and onednn_is_faster()


@cache
def onednn_is_faster() -> bool:
    """Whether this machine is one of those where oneDNN makes the better float32 code."""
    processor = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and "AVX512" in torch.backends.cpu.get_cpu_capability()
        and processor.exists()
        and "AuthenticAMD" in processor.read_text(encoding="utf-8")
    )


def _by_onednn(left_nK: Tensor, right_KH: Tensor) -> Tensor:
    made_nH: Tensor = torch.ops.mkldnn._linear_pointwise(left_nK, right_KH.t(), None, "none", [], "")
    return made_nH
