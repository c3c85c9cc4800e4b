"""`penstock train` on two ranks that it starts itself trains as one process would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.support import check_losses, train, train_by_command

pytestmark = pytest.mark.slow

STEPS = 20
ALWAYS = ("step", "loss", "learning_rate", "grad_norm", "iteration_s", "tokens_per_s", "plan")
"""Of the keys of metrics, some that every step has."""


def test_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    pair = train_by_command(tmp_path, 2, f"train.steps={STEPS}", name="pair")
    assert (pair.found["processes"], pair.found["steps"]) == (2, STEPS)
    assert [line["step"] for line in pair.metrics] == list(range(1, STEPS + 1))
    assert all(key in line for line in pair.metrics for key in ALWAYS)
    assert pair.losses[STEPS] < 0.9 * pair.losses[1]
    alone = train(tmp_path, 1, f"train.steps={STEPS}", name="alone")
    assert alone.found["processes"] == 1
    check_losses(pair.losses, alone.losses, 1e-5)
    assert pair.found["eval_loss"] == pytest.approx(alone.found["eval_loss"], rel=1e-5)
    norms = ([line["grad_norm"] for line in each.metrics] for each in (pair, alone))
    assert next(norms) == pytest.approx(next(norms), rel=1e-4)
