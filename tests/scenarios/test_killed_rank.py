"""A rank that is killed, before ranks have met or in training, ends the run, and the last line names it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.scenarios.support import FAILED, PATIENT, config_in, last_line, on_ranks, wait_for_steps
from tests.support.launched import pid_of_rank, start_launcher
from tests.support.patience import HANG_S
from tests.support.runs import wait_until

pytestmark = pytest.mark.slow

KILLED = 2


@pytest.mark.parametrize("steps", [0, 3])
def test_one_of_four_is_killed(tmp_path: Path, steps: int) -> None:
    errors = tmp_path / "errors"
    settings = (*on_ranks(4), "train.steps=100000", PATIENT)
    process = start_launcher("train", config_in(tmp_path), *settings, stderr=errors)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: len(children.read_text().split()) == 4, process)
    wait_for_steps(process, tmp_path / "run", steps)
    ranks = [pid_of_rank(process.pid, rank) for rank in range(4)]
    os.kill(ranks[KILLED], signal.SIGKILL)
    assert process.wait(timeout=HANG_S) == FAILED, errors.read_text()
    assert f"rank {KILLED} " in last_line(errors.read_text())
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()], "none is left"
