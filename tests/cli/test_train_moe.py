"""The MoE layer's parts from the configuration of `penstock train`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.dispatch import DISPATCHES
from tests.support.runs import losses, run, start, wait_until, write_config

pytestmark = pytest.mark.slow

DEEPSEEK = (
    "moe.gate=sigmoid",
    "moe.expert_bias_rate=0.01",
    "moe.num_groups=2",
    "moe.group_top_k=1",
    "moe.shared_ffn_hidden_size=24",
    "moe.aux_loss_group=sequence",
)

NODES = ("parallel.processes=4", "parallel.ranks_per_node=2")


def result_of(folder: Path, *settings: str) -> tuple[dict[str, Any], str]:
    """JSON of a run and what it said beside it."""
    ranks = "parallel.processes=2"
    done = run("train", write_config(folder), "--json", ranks, *settings)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_hierarchical_runs_lose_like_flat_ones_and_auto_says_why(tmp_path: Path) -> None:
    """Rows take another way and are summed in the same order: the same bits."""
    seen = []
    for name in (*DISPATCHES, "auto"):
        folder = tmp_path / name
        folder.mkdir()
        settings = ("train.steps=3", *NODES, f"moe.dispatch={name}")
        found, said = result_of(folder, *settings)
        assert found["dispatch"] == name or (name == "auto" and found["dispatch"] in DISPATCHES)
        seen.append(losses(folder / "run"))
    assert all(other == seen[0] for other in seen)
    (line,) = [line for line in said.splitlines() if "by the measured links" in line]
    assert f"dispatch {found['dispatch']}:" in line and all(name in line for name in DISPATCHES)
    assert 'dispatch = "auto"' in (tmp_path / "auto" / "run" / "config.toml").read_text()


def test_loss_free_balance_goes_on_where_it_was(tmp_path: Path) -> None:
    """The bias is saved with the model: a run that was stopped ends with the losses of one that was not."""
    folders, settings = [], (*DEEPSEEK, "parallel.processes=2")
    for name in ("whole", "stopped"):
        folder = tmp_path / name
        folder.mkdir()
        folders.append(folder / "run")
        config = write_config(folder)
        if name == "whole":
            assert run("train", config, *settings).returncode == 0
            continue
        process = start("train", config, *settings, stderr=folder / "stderr")
        wait_until(lambda: len(losses(folders[1])) >= 5, process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert run("train", config, *settings, "train.resume=true").returncode == 0
    assert losses(folders[0]) == losses(folders[1])


def test_losses_carry_the_name_of_their_group(tmp_path: Path) -> None:
    found, said = result_of(tmp_path, "train.steps=2", *DEEPSEEK)
    assert found["dispatch"] == "flat" and "by the measured links" not in said  # one node: nothing to choose
    for step in metrics_of(tmp_path):
        assert {key for key in step if key.startswith("aux_loss")} == {"aux_loss_sequence"}
        assert step["aux_loss_sequence"] > 0 and step["z_loss"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        ("moe.gate=noisy", "moe.order=einsum", "moe.capacity_factor=1.0"),
        ("moe.gate=cosine", "moe.compression=int8", "moe.expert=gelu"),
    ],
)
def test_parts_by_name(tmp_path: Path, settings: tuple[str, ...]) -> None:
    found, _ = result_of(tmp_path, "train.steps=10", *settings)
    assert found["last_loss"] < found["first_loss"] - 0.1


def test_gates_that_look_ahead_are_allowed_with_a_warning(tmp_path: Path) -> None:
    found, said = result_of(tmp_path, "train.steps=3", "moe.gate=soft")
    assert "looks at later tokens, too" in said
    assert found["steps"] == 3
