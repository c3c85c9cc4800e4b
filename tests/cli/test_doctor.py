"""`penstock doctor` wants what `penstock train` would: no more, no less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.autotune.choose.layouts import least_memory
from penstock.cli.main import main
from penstock.config import ConfigError, load
from penstock.topology import Layout
from penstock.train.assemble import memory_of
from penstock.train.config import RunConfig
from penstock.words import gib
from tests.support.forked import run_forked

pytestmark = pytest.mark.slow

LARGE = (
    "model.num_layers=24",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.seq_len=2048",
    "data.batch_per_device=32",
    "parallel.processes=1",
)


def memory_wanted(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the line about memory says that a rank needs."""
    main(["doctor", "--json", "tiny", *words])
    checks = json.loads(capsys.readouterr().out)["checks"]
    (found,) = [str(check["found"]) for check in checks if check["name"] == "memory"]
    return found.partition("a rank needs ")[2]


def test_what_it_wants_is_what_a_run_is_refused_for(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (LARGE, (*LARGE, "plan.recompute=blocks")):
        config = load(RunConfig, Path("tiny"), words)
        need = memory_of(config, Layout.build(config.parallel, 1, 0, config.moe.num_experts))
        assert memory_wanted(capsys, *words) == f"{gib(need.total_bytes)} at the least"


def test_an_open_layout_is_no_fault() -> None:
    """Six experts divide among the ranks of some layouts of four."""
    done = run_forked(4, "doctor", "--json", "tiny", "plan.layout=auto", "moe.num_experts=6")
    checks = json.loads(done.stdout)["checks"]
    assert "a rank needs" in next(check["found"] for check in checks if check["name"] == "memory")


def test_a_layout_that_cannot_be_is_one() -> None:
    with pytest.raises(ConfigError, match="no layout of 4 ranks divides"):
        least_memory(load(RunConfig, Path("tiny"), ["plan.layout=auto", "parallel.ep_size=3"]), 4)


def test_a_schedule_that_is_named_is_given() -> None:
    """As `penstock train` takes it: without it a wrong number of microbatches would pass."""
    words = ["schedule.name=flowmoe", "schedule.microbatches=64"]
    assert main(["doctor", "tiny", "parallel.processes=1", *words]) == 2


def test_a_plan_file_that_cannot_be_looked_at_is_no_crash(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel.processes=1", "plan.mode=replay", f"plan.file={'n' * 300}/plan.json"]
    assert memory_wanted(capsys, *words)
