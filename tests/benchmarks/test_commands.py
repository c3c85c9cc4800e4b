"""The benchmarks' command lines on real processes: what they print and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_bench import QUICK
from tests.support.runs import check_refusal, clean_environ

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STARTED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
STARTED |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}


def run(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.ARGUMENTS`, to its end."""
    module, *rest = arguments
    command = [sys.executable, "-m", f"benchmarks.{module}", *rest]
    environ = clean_environ() | (environ or {})
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=150, check=False
    )


def test_collectives_as_json() -> None:
    result = run("collectives", "--json", *QUICK)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["ranks"], found["nodes"], found["inter_rate_bit_per_s"]) == (2, 1, None)
    names = {row["collective"] for row in found["collectives"]}
    assert names == {"counts", "all-to-all, even", "all-to-all, uneven", "all-reduce"}
    for row in found["collectives"]:
        assert row["times_s"].keys() == {"penstock", "gloo"}


def test_settings_stand_before_and_after_options() -> None:
    result = run("dispatches", "compare.rounds=1", "--json", "moe.num_experts=4")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["ranks"] == 2 and found["models"].keys() == {"flat"}


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["collectives", "parallel.processes=1"], {}, ["processes = 1", "Use 2 or more"]),
        (["collectives", "--inter-rate", "1gbit"], {}, ["--inter-rate", "Add --emulate"]),
        (
            ["collectives", "--emulate", "2x1"],
            STARTED,
            ["--emulate", "-m benchmarks.collectives"],
        ),
        (["layer"], STARTED, ["python -m benchmarks.layer", "Start it once"]),
    ],
)
def test_what_is_wrong_is_named_with_a_way_out(
    arguments: list[str], environ: dict[str, str], words: list[str]
) -> None:
    result = run(*arguments, environ=environ)
    check_refusal(result.returncode, result.stdout, result.stderr)
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize(
    "module", ["collectives", "dispatches", "drift", "interpreter", "layer", "published", "suite"]
)
def test_help_says_what_to_type(module: str) -> None:
    result = run(module, "--help")
    assert result.returncode == 0, result.stderr
    assert f"usage: python -m benchmarks.{module} " in result.stdout
