"""How contenders are timed: who comes when, what is kept, and that nothing is left changed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.layer.measure import Band, in_turns, quiet_process


def test_contenders_take_turns_and_nobody_always_comes_first() -> None:
    order: list[str] = []
    found = in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2, warmup=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(values) for name, values in found.items()} == {"a": 2, "b": 2}


def test_a_band_holds_eight_of_ten_rounds() -> None:
    band = Band.of([float(n) for n in range(11)])
    assert (band.low, band.median, band.high) == pytest.approx((1.0, 5.0, 9.0))


def test_ratios_are_taken_round_by_round() -> None:
    assert Band.of_ratios([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == Band(median=2.0, low=2.0, high=2.0)


def test_one_thread_and_then_as_many_as_before() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="stop"), quiet_process():
        assert torch.get_num_threads() == 1
        raise RuntimeError("stop")
    assert torch.get_num_threads() == before
