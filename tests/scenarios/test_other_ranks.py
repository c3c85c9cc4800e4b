"""What four ranks have saved goes on on two, with the losses of a run that was not interrupted.

In `make test` runs in one process do so, see tests/cli/test_train.py and tests/train/test_layout_runs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.support import check_losses, train

pytestmark = [pytest.mark.slow, pytest.mark.soak]

SAVED_AT, STEPS = 5, 10
SETTINGS = ("model.dropout=0.1", "optimizer.min_lr_ratio=1")
"""The rate of a step does not depend on the number of steps."""


def test_two_ranks_go_on_where_four_have_stopped(tmp_path: Path) -> None:
    whole = train(tmp_path, 4, *SETTINGS, f"train.steps={STEPS}", name="whole")
    stopped = train(tmp_path, 4, *SETTINGS, f"train.steps={SAVED_AT}", name="resumed")
    until_then = stopped.metrics
    resumed = train(tmp_path, 2, *SETTINGS, f"train.steps={STEPS}", "train.resume=true", name="resumed")
    assert (stopped.found["processes"], resumed.found["processes"]) == (4, 2)
    assert resumed.metrics[:SAVED_AT] == until_then, "no step was done again"
    check_losses(resumed.losses, whole.losses, 1e-6)
