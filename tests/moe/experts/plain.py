"""Numbers, ways of multiplying, and the loop over rows that products are compared with.

Shapes: R rows, M and H widths, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from penstock.moe import products

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}

TYPES = [*((each, each) for each in TOLERANCE), (torch.bfloat16, torch.float32)]
"""Of rows and of weights."""

SIZES = {
    "equal": (3, 3, 3),
    "one expert": (5,),
    "uneven": (4, 1, 2),
    "some empty": (0, 6, 0),
    "the last one empty": (2, 3, 0),
    "all empty": (0, 0, 0),
}

WAYS = ("library", "expert by expert", "grouped kernel")
"""Large products take another way than small ones, and GPUs with a grouped kernel one of their own."""


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make products of any size go one way, whatever the processor."""
    large = way == "expert by expert"
    if way == "grouped kernel":  # what it computes on a GPU, its substitute computes here
        monkeypatch.setattr(products, "has_grouped_kernel", lambda rows: rows.dtype in products.GROUPED_TYPES)
    monkeypatch.setattr(products, "SMALL", 1 << 62 if way == "grouped kernel" else 0)
    monkeypatch.setattr(products, "CACHED", -1 if large else 1 << 62)
    monkeypatch.setattr(products, "LARGE", 0 if large else 1 << 62)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: hasattr(torch.ops.mkldnn, "_linear_pointwise"))


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def by_loop(
    rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int], grad_RH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Product, gradient of the rows and of the weights, in float64, one row at a time."""
    rows_RM, weight_EMH, grad_RH = rows_RM.double(), weight_EMH.double(), grad_RH.double()
    out_RH, grad_RM, grad_EMH = grad_RH * 0, rows_RM * 0, weight_EMH * 0
    experts = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    for row, expert in enumerate(experts):
        out_RH[row] = rows_RM[row] @ weight_EMH[expert]
        grad_RM[row] = weight_EMH[expert] @ grad_RH[row]
        grad_EMH[expert] += torch.outer(rows_RM[row], grad_RH[row])
    return out_RH, grad_RM, grad_EMH


def check_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Close as a whole: a single number may be the small rest of large ones."""
    assert found.shape == wanted.shape
    difference, size = float((found.detach().double() - wanted).norm()), float(wanted.norm())
    assert difference <= tolerance * max(size, 1e-9)
