"""Placement in real training: what runs said becomes a table, and turns continue the same model."""

from __future__ import annotations

import pytest

from benchmarks.trained import CONTENDERS, TrainedResult, _summary, _Turn, render_trained
from penstock.lab.bench.config import Named


def turn(seconds: float, loss: float = 2.0) -> _Turn:
    """Steps that took so long, after some slower ones that do not count."""
    slow = [{"iteration_s": 9.0, "loss": 3.0}] * 4
    loads = {"rank_rows_max_over_mean": [1.5, 1.7], "rows_crossing_nodes": [0.5, 0.3]}
    return _Turn(steps=[*slow, *[{"iteration_s": seconds, "loss": loss, **loads}] * 3], uplink_bytes=2e6)


def test_turns_are_compared_round_by_round() -> None:
    case = _summary("flowmoe+netmoe", 1e8, [turn(1.0), turn(2.0), turn(1.0)], [2.0, 3.0, 1.5])
    assert case.iterations_s == (1.0, 2.0, 1.0)
    assert case.speedup.median == pytest.approx(1.5)
    assert (case.imbalance, case.crossing, case.loss) == pytest.approx((1.6, 0.4, 2.0))


def test_the_table() -> None:
    cases = [_summary(name, 1e8, [turn(1.0, loss)], [1.1]) for name, loss in (("flowmoe", 2.0), ("b", 2.2))]
    text = render_trained(TrainedResult(trained=tuple(cases)))
    assert "1.10 [1.10, 1.10]" in text and "40 %" in text and "differ by 1.0e-01" in text


def test_contenders_are_names_that_a_comparison_knows() -> None:
    assert [Named.of(name).schedule for name in CONTENDERS] == ["flowmoe"] * len(CONTENDERS)
