"""A rank that is killed in the middle of training ends the run, and the last line names it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.scenarios.support import FAILED, PATIENT, config_in, last_line, on_ranks, wait_for_steps
from tests.support.launched import pid_of_rank, start_launcher
from tests.support.patience import HANG_S

pytestmark = pytest.mark.slow

KILLED = 2


def test_one_of_four_is_killed(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    settings = (*on_ranks(4), "train.steps=100000", PATIENT)
    process = start_launcher("train", config_in(tmp_path), *settings, stderr=errors)
    wait_for_steps(process, tmp_path / "run", 3)
    ranks = [pid_of_rank(process.pid, rank) for rank in range(4)]
    os.kill(ranks[KILLED], signal.SIGKILL)
    assert process.wait(timeout=HANG_S) == FAILED, errors.read_text()
    assert f"rank {KILLED} " in last_line(errors.read_text())
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()], "none is left"
