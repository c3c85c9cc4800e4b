"""A setting that cannot be used, found by some ranks only or by all: somebody says so, once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.forked import run_forked
from tests.support.patience import HANG_S
from tests.support.runs import write_config

pytestmark = pytest.mark.slow


def run(
    folder: Path, on_a_rank: str, *arguments: str | Path, timeout_s: float = HANG_S
) -> subprocess.CompletedProcess[str]:
    """The command on two ranks, which do `on_a_rank`, some lines of Python, before it."""
    program = folder / "ranks.py"
    start = "from penstock.cli.main import main\nsys.exit(main())\n"
    program.write_text(f"import os, sys\nrank = os.environ['RANK']\n{on_a_rank}\n{start}")
    return run_forked(2, *arguments, f"parallel.timeout_s={timeout_s}", program=str(program))


def test_a_package_that_one_machine_lacks(tmp_path: Path) -> None:
    (tmp_path / "found" / "wandb").mkdir(parents=True)
    (tmp_path / "found" / "wandb" / "__init__.py").write_text("")
    lacking = f"""
if rank == "0":
    sys.path.insert(0, {str(tmp_path / "found")!r})
"""
    done = run(tmp_path, lacking, "train", write_config(tmp_path), "metrics.wandb=offline")
    assert done.returncode == 2
    assert done.stderr.count("penstock: ") == 1
    assert 'metrics.wandb = "offline": on rank 1, needs the package wandb' in done.stderr


@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_machine_with_less_memory_than_the_others(tmp_path: Path, command: str) -> None:
    small = "import penstock.train.assemble as found\nif rank == '1':\n    found.host_bytes = lambda: 1"
    more = [write_config(tmp_path)] if command == "train" else ["--out", tmp_path / "cluster.json"]
    done = run(tmp_path, small, command, *more)
    assert done.returncode == 2
    assert done.stderr.count("penstock: ") == 1
    assert "on rank 1, a rank needs" in done.stderr


REFUSES = """
import penstock.train.trainer as found
from penstock.config import ConfigError

def build_machinery(*_):
    raise ConfigError("moe.num_experts", 7, "is odd")

if rank in {ranks!r}:
    found.build_machinery = build_machinery
"""
"""These ranks find something while the others build what they talk through."""


def test_what_rank_1_alone_finds_is_said_by_it_and_heard_by_others(tmp_path: Path) -> None:
    done = run(tmp_path, REFUSES.format(ranks="1"), "train", write_config(tmp_path))
    lines = done.stderr.splitlines()
    assert sum(line.startswith("penstock: moe.num_experts = 7: is odd") for line in lines) == 1, lines
    assert any("rank 1 had failed: moe.num_experts = 7" in line for line in lines), lines


def test_what_all_find_is_said_once(tmp_path: Path) -> None:
    done = run(tmp_path, REFUSES.format(ranks="01"), "train", write_config(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("moe.num_experts = 7") == 1


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.tp_size=2", "moe.gate=soft"),
        ("placement.experts=shadowing", "placement.split=exact"),
    ],
)
def test_ranks_of_another_launcher_refuse_what_does_not_go_together(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    done = run(tmp_path, "", "train", write_config(tmp_path), *settings)
    assert done.returncode == 2
    assert done.stderr.count("penstock: ") == 1 and "Traceback" not in done.stderr


def test_a_rank_that_cannot_even_join_says_why(tmp_path: Path) -> None:
    lost = "if rank == '1':\n    del os.environ['MASTER_ADDR']"
    done = run(tmp_path, lost, "train", write_config(tmp_path), timeout_s=1)  # all of which rank 0 waits
    assert "penstock: MASTER_ADDR: is not set" in done.stderr
    assert "rank 0 of 2 could not join the others" in done.stderr
    assert "rank 1 has not come" in done.stderr
