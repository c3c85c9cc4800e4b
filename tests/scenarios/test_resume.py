"""A run that was stopped and resumed ends with the very same bits as one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.support import check_equal, check_losses, train

pytestmark = pytest.mark.slow

STOPPED_AT, STEPS = 5, 9
SETTINGS = ("model.dropout=0.1", "moe.gate=noisy", "optimizer.min_lr_ratio=1", "optimizer.warmup_steps=7")
"""Dropout and noise draw random numbers; the rate still rises when the run stops, to the same for any end."""


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(tmp_path, 2, *SETTINGS, f"train.steps={STEPS}", name="whole")
    stopped = train(tmp_path, 2, *SETTINGS, f"train.steps={STOPPED_AT}", name="resumed")
    until_then = stopped.metrics
    resumed = train(tmp_path, 2, *SETTINGS, f"train.steps={STEPS}", "train.resume=true", name="resumed")
    assert resumed.metrics[:STOPPED_AT] == until_then, "times included: no step was done again"
    check_losses(resumed.losses, whole.losses, 0)
    check_equal(resumed.parameters(), whole.parameters())
