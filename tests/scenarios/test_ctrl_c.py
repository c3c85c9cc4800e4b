"""Ctrl-C ends a run with what was trained saved, and what was saved goes on; whoever gets the signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.scenarios.support import (
    DONE,
    INTERRUPTED,
    PATIENT,
    check_losses,
    config_in,
    on_ranks,
    train,
    wait_for_steps,
)
from tests.support.launched import start_launcher
from tests.support.patience import HANG_S
from tests.support.runs import Running, metrics_of, refused, wait_until

pytestmark = pytest.mark.slow

ENDLESS = ("train.steps=100000", "optimizer.min_lr_ratio=1", PATIENT)


def interrupt_the_command(process: Running) -> None:
    """Do what `kill -INT` does."""
    os.kill(process.pid, signal.SIGINT)


def interrupt_all(process: Running) -> None:
    """Do what a terminal does."""
    os.killpg(process.pid, signal.SIGINT)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """Twice, by one way after the other: in the end as if nothing had happened."""
    errors, done = tmp_path / "errors", metrics_of(tmp_path / "run")
    for interrupt, resume in ((interrupt_the_command, "false"), (interrupt_all, "true")):
        settings = (*on_ranks(2), *ENDLESS, f"train.resume={resume}")
        process = start_launcher("train", config_in(tmp_path), *settings, stderr=errors)
        wait_for_steps(process, tmp_path / "run", len(done) + 3)
        interrupt(process)
        assert process.wait(timeout=HANG_S) == DONE, errors.read_text()
        before, done = done, metrics_of(tmp_path / "run")
        assert done[: len(before)] == before, "no step was done again"
    steps = f"train.steps={len(done) + 3}"
    resumed = train(tmp_path, 2, *ENDLESS, steps, "train.resume=true")
    assert resumed.metrics[: len(done)] == done
    whole = train(tmp_path, 2, *ENDLESS, steps, name="whole")
    check_losses(resumed.losses, whole.losses, 0)


def test_before_training_nothing_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run still measures its cluster, and would for ten minutes."""
    config, errors = config_in(tmp_path), tmp_path / "errors"
    measuring = (*on_ranks(2), "plan.mode=auto", "plan.profile_s=600", PATIENT)
    process = start_launcher("train", config, *measuring, stderr=errors)
    wait_until(lambda: errors.exists() and "measuring the cluster" in errors.read_text(), process)
    interrupt_all(process)
    assert process.wait(timeout=HANG_S) == INTERRUPTED, errors.read_text()
    refused(capsys, "train", config, *on_ranks(2), "train.resume=true")
