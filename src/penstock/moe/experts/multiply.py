"""One matrix product, by whichever of PyTorch's libraries is the fastest for it.

On AMD processors MKL multiplies eight float32 numbers at a time where oneDNN takes sixteen: on a
fifth-generation EPYC that makes oneDNN 2.2 times as fast. On other processors the two are alike, and MKL
does not have to generate code for shapes that it has not met.
Shapes: n rows, K and H widths of a matrix.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from penstock.device import device_of

LARGE = 1 << 26
"""Number of multiplications from which oneDNN takes less time than MKL although it generates code first: it
does so for every new number of rows, hence in every step of dropless routing."""


def multiply(left_nK: Tensor, right_KH: Tensor, out_nH: Tensor, *, add: bool = False) -> None:
    """Write left times right into `out`, or add it. `out` may be of a wider type than the factors."""
    if is_for_onednn(left_nK.shape[0], right_KH):
        made_nH: Tensor = torch.ops.mkldnn._linear_pointwise(left_nK, right_KH.t(), None, "none", [], "")
        put(made_nH, out_nH, add=add)
    elif out_nH.dtype != left_nK.dtype:
        put(torch.mm(left_nK, right_KH), out_nH, add=add)
    elif add:
        out_nH.addmm_(left_nK, right_KH)
    else:
        torch.mm(left_nK, right_KH, out=out_nH)


def put(made: Tensor, out: Tensor, *, add: bool) -> None:
    """Copy `made` into `out`, or add it to `out`."""
    if add:
        out.add_(made)
    else:
        out.copy_(made)


def is_for_onednn(rows: int, right_KH: Tensor) -> bool:
    """Return whether oneDNN is the faster library for a product of this number of rows with a matrix."""
    large = rows * right_KH.shape[-2] * right_KH.shape[-1] >= LARGE
    return large and right_KH.dtype == torch.float32 and device_of(right_KH).is_cpu and onednn_is_faster()


@cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN generates the faster float32 code on this machine."""
    processor = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and "AVX512" in torch.backends.cpu.get_cpu_capability()
        and processor.exists()
        and "AuthenticAMD" in processor.read_text(encoding="utf-8")
    )
