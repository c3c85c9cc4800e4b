"""The high-water mark sees memory that was used and given back."""

from __future__ import annotations

import torch

from penstock.lab.bench.contender import peak_bytes, start_peak

MEBIBYTE = 1 << 20


def use(mebibytes: int) -> int:
    resident = start_peak()
    torch.ones(mebibytes * MEBIBYTE // 4).sum()
    return peak_bytes() - resident


def test_a_peak_is_what_was_used_since_the_start() -> None:
    use(1)  # the first use loads code, which stays
    small, large, small_again = use(16), use(128), use(16)
    assert large >= 120 * MEBIBYTE
    assert small < 64 * MEBIBYTE and small_again < 64 * MEBIBYTE
