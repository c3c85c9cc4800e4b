"""The drift benchmark: what it makes of two runs, and how it slows a rank down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import drift
from benchmarks.drift import (
    CASES,
    DriftCase,
    DriftResult,
    DriftsResult,
    _hold,
    _pid_of_rank,
    _Training,
    measure_drifts,
    render_drifts,
)
from benchmarks.launching import check_end
from benchmarks.progress import PROGRESS
from penstock.train.launcher import LaunchOutcome
from tests.support.patience import HANG_S, wait_for

RESULT = DriftsResult(
    cases=(
        DriftResult(
            change="rate",
            rate_before=1e9,
            rate_after=250e6,
            before_s=1.0,
            hit_s=2.4,
            settled_s=2.06,
            planned_s=2.0,
            noticed_after=17,
            loss_distance=3e-7,
            end_loss_distance=1e-8,
            said=("plan changes",),
        ),
    )
)


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A child with a rank's environment that sleeps."""
    environ = {**os.environ, "RANK": "1"}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environ) as process:
        yield process
        process.kill()


def state_of(pid: int) -> str:
    """R, S, T (held), Z, ... as the kernel says."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_result_becomes_a_table() -> None:
    text = render_drifts(RESULT)
    assert "| 1000 to 250 Mbit/s | 1000 | 2400 | 17 | 2060 | 2000 | +3.0 % |" in text
    assert "    plan changes" in text


@pytest.mark.parametrize(("ended", "left"), [(0, None), (1, RESULT)])
def test_a_signal_ends_all_of_it_and_keeps_what_had_ended(
    ended: int, left: DriftsResult | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher ends its ranks by itself, and they save and exit with 0: the next run must not begin."""
    outcome = LaunchOutcome(
        exit_codes=(0, 0), first_failure=None, stopped=frozenset(), interrupted_by=signal.SIGTERM
    )
    begun: list[DriftCase] = []

    def measured(case: DriftCase) -> DriftResult:
        begun.append(case)
        if len(begun) > ended:
            check_end(outcome, "saved")
        return RESULT.cases[0]

    monkeypatch.setattr(drift, "_measure", measured)
    PROGRESS.begin("drift", shown=False)
    with pytest.raises(KeyboardInterrupt):
        measure_drifts([CASES[0]] * 3)
    assert PROGRESS.kept() == left and len(begun) == ended + 1


def test_plans_before_the_change_do_not_count() -> None:
    steps = [{"plan": name} for name in "aabbbbcc"]  # the second plan is the order frozen again
    run = _Training(steps=steps, said=())
    assert run.noticed_after(4) == 2
    assert run.noticed_after(7) is None


def test_a_rank_is_found_held_and_let_go(rank: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: _pid_of_rank(1) == rank.pid)  # the child's environment is its own only after exec
    assert _pid_of_rank(77) is None
    ended = threading.Event()
    holder = threading.Thread(target=_hold, args=(rank.pid, ended))
    holder.start()
    wait_for(lambda: state_of(rank.pid) == "T")
    ended.set()
    holder.join()
    wait_for(lambda: state_of(rank.pid) != "T")
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(timeout=HANG_S) == -signal.SIGTERM
