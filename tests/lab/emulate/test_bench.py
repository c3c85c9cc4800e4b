"""`penstock bench` on emulated links: the limit comes from bytes that crossed and the rate that was set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.commands.test_bench import QUICK
from tests.support.launched import start_launcher
from tests.support.patience import HANG_S
from tests.support.runs import clean_environ

ROOT = Path(__file__).parents[3]
ONCE = ("compare.rounds=1", "compare.profile_s=0.1")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulation")]


def test_the_limit_is_that_of_the_slow_link(tmp_path: Path) -> None:
    options = ("--emulate", "2x1", "--inter-rate", "200mbit", "--schedules", "sequential,penstock")
    out, errors = tmp_path / "out", tmp_path / "errors"
    started = start_launcher("bench", "--json", *options, *QUICK, stderr=errors, stdout=out)
    assert started.wait(timeout=HANG_S) == 0, errors.read_text()
    found = json.loads(out.read_text())
    assert (found["ranks"], found["nodes"], found["inter_rate_bit_per_s"]) == (2, 2, 200e6)
    assert found["wire_s"] == pytest.approx(found["wire_bytes"] * 8 / 200e6)
    assert found["limit_s"] == max(found["wire_s"], found["compute_s"])
    assert [case["schedule"] for case in found["cases"]] == ["sequential", "penstock"]
    for case in found["cases"]:
        assert case["limit_s"] == found["limit_s"]
        assert case["overlap_efficiency"] == pytest.approx(found["limit_s"] / case["iteration_s_median"])


@pytest.mark.soak
def test_a_benchmark_of_its_own_knows_the_rate() -> None:
    options = ("--emulate", "2x1", "--inter-rate", "200mbit", "moe.num_experts=2", *ONCE)
    command = [sys.executable, "-m", "benchmarks.collectives", "--json", *options]
    result = subprocess.run(
        command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["ranks"], found["nodes"], found["inter_rate_bit_per_s"]) == (2, 2, 200e6)
