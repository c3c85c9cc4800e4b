"""One product, by both libraries, written and added."""

from __future__ import annotations

import pytest
import torch

from penstock.lab.bench.contender import start_peak
from penstock.moe import products
from tests.moe.experts.plain import TOLERANCE, WAYS, check_close, numbers, take


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_written_or_added(
    dtype: torch.dtype, out_dtype: torch.dtype, add: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(way, monkeypatch)
    left, right = numbers(5, 7, dtype=dtype), numbers(7, 3, dtype=dtype, seed=1)
    out = numbers(2, 5, 3, dtype=out_dtype, seed=2)  # a part of something larger, as a weight's gradient is
    wanted = left.double() @ right.double() + (out[1].double() if add else 0)
    kept = out[0].clone()
    if not add:
        out[1] = torch.nan  # what was there must not be read
    products.multiply(left, right, out[1], add=add)
    check_close(out[1], wanted, TOLERANCE[dtype])
    assert torch.equal(out[0], kept)


def test_factors_may_be_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    take("expert by expert", monkeypatch)
    left, right = numbers(7, 5, dtype=torch.float32), numbers(3, 7, dtype=torch.float32, seed=1)
    out = torch.empty(5, 3)
    products.multiply(left.t(), right.t(), out)
    check_close(out, left.t().double() @ right.t().double(), TOLERANCE[torch.float32])


def test_only_large_float32_products_are_for_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    matrix = torch.empty(1 << 10, 1 << 11, device="meta")
    assert not products.is_for_onednn(1 << 10, matrix), "not on the CPU"
    matrix = torch.empty(1, 1).expand(1 << 10, 1 << 11)
    assert products.is_for_onednn(1 << 5, matrix)
    assert not products.is_for_onednn((1 << 5) - 1, matrix)
    assert not products.is_for_onednn(1 << 5, matrix.double())
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    assert not products.is_for_onednn(1 << 5, matrix)


def test_numbers_of_rows_that_change_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropless routing each step has its own; oneDNN keeps code and a packed matrix for every shape."""
    take("expert by expert", monkeypatch)
    matrix, resident = numbers(256, 256, dtype=torch.float32), 0
    for rows in range(200):
        given = numbers(1 + rows % 64, 256, dtype=torch.float32)
        products.multiply(given, matrix, torch.empty_like(given))
        products.multiply(given.t(), given, torch.empty_like(matrix))
        if rows == 8:
            resident = start_peak()
    assert start_peak() - resident < 16 << 20
