"""The MoE layer's parts from the configuration of `penstock train`.

Where the command itself makes no difference, ranks that have loaded torch already run what it runs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.features.dispatch import DISPATCHES
from penstock.report import RunSummary
from tests.support.forked import run_forked
from tests.support.ranks import Pools
from tests.support.runs import losses, write_config
from tests.support.training import train_on

pytestmark = pytest.mark.slow

DEEPSEEK = (
    "moe.gate=sigmoid",
    "moe.expert_bias_rate=0.01",
    "moe.num_groups=2",
    "moe.group_top_k=1",
    "moe.shared_ffn_hidden_size=24",
    "moe.aux_loss_group=sequence",
)


def trained(ranks: Pools, folder: Path, *settings: str, processes: int = 2) -> tuple[RunSummary, str]:
    """Summary of a run in `folder`, and what its first rank said."""
    folder.mkdir(exist_ok=True)
    write_config(folder)
    first, *_ = told = ranks(processes).run(train_on, processes, folder, list(settings), None)
    assert all(each.refused is None for each in told), first.refused
    assert first.summary is not None
    return first.summary, first.said


def test_hierarchical_runs_lose_like_flat_ones_and_auto_says_why(ranks: Pools, tmp_path: Path) -> None:
    """Rows take another way and are summed in the same order: the same bits, but for one copy per node.

    Steps by the other dispatches are those of the reference, see tests/runtime/test_cases.py.
    """
    seen = []
    for name in ("flat", "hierarchical_2d", "auto"):
        folder = tmp_path / name
        settings = (
            "train.steps=3",
            "parallel.ranks_per_node=2",
            f"moe.dispatch={name}",
            "plan.profile_s=0.1",
        )
        found, said = trained(ranks, folder, *settings, processes=4)
        assert found.dispatch == name or (name == "auto" and found.dispatch in DISPATCHES)
        seen.append((found.dispatch, losses(folder / "run")))
    for dispatch, each in seen:
        assert each == (pytest.approx(seen[0][1]) if DISPATCHES[dispatch].joins_rows else seen[0][1])
    assert len(seen[0][1]) == 3
    assert said.count(f"dispatch {found.dispatch} chosen: predicted step times") == 1
    assert all(name in said for name in DISPATCHES)
    assert 'dispatch = "auto"' in (tmp_path / "auto" / "run" / "config.toml").read_text()


def test_loss_free_balance_goes_on_where_it_was(ranks: Pools, tmp_path: Path) -> None:
    """The bias is saved with the model: a run that was cut short ends with the losses of one that was not."""
    trained(ranks, tmp_path, *DEEPSEEK, "train.checkpoint_every=3", "train.steps=5")
    folder = tmp_path / "run"
    expected = losses(folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000005")
    _, said = trained(ranks, tmp_path, *DEEPSEEK, "train.steps=5", "train.resume=true")
    assert "step-00000003" in said
    assert losses(folder) == expected and len(expected) == 5


def test_losses_carry_the_name_of_their_group(tmp_path: Path) -> None:
    done = run_forked(2, "train", write_config(tmp_path), "--json", "train.steps=2", *DEEPSEEK)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["dispatch"] == "flat"
    assert "by the measured links" not in done.stderr  # one node: nothing to choose
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert {key for key in step if key.startswith("aux_loss")} == {
            "aux_loss_sequence",
            "aux_loss_by_layer",
        }
        assert step["aux_loss_sequence"] > 0 and step["z_loss"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        ("moe.gate=noisy", "moe.permutation=einsum", "moe.capacity_factor=1.0"),
        ("moe.gate=cosine", "moe.comm_dtype=int8", "moe.expert=gelu"),
    ],
)
def test_parts_by_name(ranks: Pools, tmp_path: Path, settings: tuple[str, ...]) -> None:
    found, _ = trained(ranks, tmp_path, "train.steps=10", *settings)
    assert found.last_loss < found.first_loss - 0.1


def test_gates_that_look_ahead_are_allowed_with_a_warning(ranks: Pools, tmp_path: Path) -> None:
    found, said = trained(ranks, tmp_path, "train.steps=3", "moe.gate=soft")
    assert "looks at later tokens, too" in said
    assert found.steps == 3
