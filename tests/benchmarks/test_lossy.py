"""Losses with rounded rows: what runs said becomes a table, beside what another order of sums does."""

from __future__ import annotations

import pytest

from benchmarks.lossy import CASES, SETTINGS, STEPS, LossyCase, LossyResult, render_lossy, summary
from penstock.config import load
from penstock.train.config import RunConfig


def test_the_end_of_a_run_is_what_counts() -> None:
    steps = [{"loss": 9.0}] * 3 + [{"loss": 2.0}] * 49 + [{"loss": 3.0, "eval_loss": 2.5}]
    found = summary("int8", steps)
    assert found.loss == pytest.approx(2.02) and found.held_out == 2.5


def test_the_table_has_differences_and_the_spread_of_the_controls() -> None:
    losses = (2.0, 2.0010, 2.0300, 2.0020, 1.9970)
    cases = tuple(
        LossyCase(name=name, loss=loss, held_out=loss + 0.1) for name, loss in zip(CASES, losses, strict=True)
    )
    text = render_lossy(LossyResult(steps=STEPS, cases=cases))
    assert "+0.0300" in text and "-0.0030" in text and "by up to 0.0030" in text


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_a_configuration(name: str) -> None:
    config = load(RunConfig, None, [*SETTINGS, *CASES[name]])
    assert config.moe.capacity_factor is None, "no token may be dropped where only sums are to differ"
