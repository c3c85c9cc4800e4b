"""The benchmarks' command lines on real processes: what they print and refuse."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.sft.contenders import CONTENDERS
from benchmarks.sft.measure import ENVIRON
from penstock.adapt import planning
from tests.lab.commands.test_bench import QUICK
from tests.support.forked import run_forked
from tests.support.launched import start_launcher
from tests.support.patience import HANG_S
from tests.support.runs import check_refusal

pytestmark = pytest.mark.slow

STARTED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
STARTED |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}


def test_collectives_as_json() -> None:
    """Settings may stand before and after options. One that starts its ranks: tests/lab/emulate."""
    result = run_forked(2, QUICK[0], "--json", *QUICK[1:], program="benchmarks.collectives")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["ranks"], found["nodes"], found["inter_rate_bit_per_s"]) == (2, 1, None)
    names = {row["collective"] for row in found["collectives"]}
    assert names == {"counts", "all-to-all, even", "all-to-all, uneven", "all-reduce"}
    for row in found["collectives"]:
        assert row["times_s"].keys() == {"penstock", "gloo"}


def said_by(
    module: str, *arguments: str, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What becomes of a command that starts no rank, in a process of its own."""
    return run_forked(1, *arguments, program=f"benchmarks.{module}", environs=[environ or {}])


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
    run = said_by(*arguments, environ=environ)
    check_refusal(run.returncode, run.stdout, run.stderr)
    assert all(word in run.stderr for word in words), run.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="it emulates a cluster")
def test_a_program_that_fails_is_quoted() -> None:
    run = said_by("predictions", "--rates", "300mbit", "moe.top_k=99")
    assert (run.returncode, run.stdout) == (1, "")
    assert "penstock bench at 300mbit ended with 2" in run.stderr and "moe.top_k = 99" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("module", ["collectives", "published", "suite"])
def test_help_says_what_to_type(module: str) -> None:
    run = said_by(module, "--help")
    assert (run.returncode, run.stderr) == (0, "")
    assert f"usage: python -m benchmarks.{module} " in run.stdout


def load_script() -> None:
    """Import what takes seconds, once for all ranks, which are forked off this process; let them profile the
    cluster for a moment only, and compile nothing: DeepSpeed has sums in shared memory, in C++."""
    os.environ.update(ENVIRON)
    torch.set_num_threads(1)
    for name in ("trl.scripts.sft", "trl.trainer.sft_trainer", "transformers.models.qwen3_moe", "deepspeed"):
        importlib.import_module(name)
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    planning.PROFILE_S = 0.1


@pytest.mark.parametrize(
    "contenders",
    [
        ["penstock", "transformers", "autoep"],
        pytest.param([contender.name for contender in CONTENDERS], marks=pytest.mark.soak),
    ],
    ids=len,
)
def test_the_script_of_trl_has_the_losses_of_one_process(tmp_path: Path, contenders: list[str]) -> None:
    """By every system; on two processes beside each other, experts of a node are those of all ranks."""
    pytest.importorskip("deepspeed")
    once = ("--rounds", "1", "--steps", "1", "--warmup", "1", "--samples", "1", "--length", "32")
    small = ("--layers", "1", "--hidden", "64", "--experts", "4", "--top-k", "2", "--expert-width", "32")
    out, errors = tmp_path / "out", tmp_path / "errors"
    words = ("--json", *once, *small, "--contenders", ";".join(contenders))
    run = start_launcher(*words, stderr=errors, stdout=out, meddle=load_script, program="benchmarks.sft")
    assert run.wait(timeout=HANG_S) == 0, errors.read_text()
    rows = [line.split("|") for line in json.loads(out.read_text())["text"].splitlines() if "|" in line]
    distances = {row[1].strip(): float(row[-2]) for row in rows[2:]}
    assert list(distances) == contenders and max(distances.values()) < 1e-3
