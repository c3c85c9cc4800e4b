"""A folder of transformers, trained on two ranks, goes back to transformers, and on to other ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.scenarios.fine_tune import MAX_NORM, RATE, batch_of
from tests.scenarios.support import DONE, check_equal, check_losses
from tests.support.adapted import small
from tests.support.forked import run_forked

pytestmark = pytest.mark.slow

SAVED_AT, STEPS = 3, 6
ROUNDED = 1e-5
"""transformers routes and norms in float32."""

EXACT = 1e-10
"""In float64."""


def fine_tune(ranks: int, folder: Path, out: Path, *steps: int) -> dict[int, float]:
    """Run the program beside this file; return its losses."""
    out.mkdir()
    program = Path(__file__).with_name("fine_tune.py")
    result = run_forked(ranks, folder, out, *map(str, steps), program=str(program))
    assert result.returncode == DONE, result.stderr
    return {int(step): loss for step, loss in json.loads(result.stdout).items()}


def plain(folder: Path) -> Any:
    """Return the model in a folder, as transformers reads it."""
    # Its other ways to compute experts know no float64.
    eager = {"experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
    assert type(model).__module__.startswith("transformers.")
    return model


def parameters_in(folder: Path) -> dict[str, Tensor]:
    return dict(plain(folder).state_dict())


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE, saved by transformers."""
    folder = tmp_path_factory.mktemp("start")
    small("qwen3_moe").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(start: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """What two ranks have left, and their losses."""
    folder = tmp_path_factory.mktemp("pair") / "out"
    return folder, fine_tune(2, start, folder, 0, STEPS)


def test_it_is_trained_as_by_transformers_alone(start: Path, pair: tuple[Path, dict[int, float]]) -> None:
    model, found = plain(start).train(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        loss = model(input_ids=batch_of(step), labels=batch_of(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found[step] = loss.item()
    check_losses(pair[1], found, ROUNDED)


def test_transformers_reads_what_the_ranks_had(pair: tuple[Path, dict[int, float]]) -> None:
    folder, _ = pair
    model = plain(folder / f"step-{STEPS}").eval()
    for rank in range(2):
        left = torch.load(folder / f"rank{rank}.pt")
        with torch.no_grad():
            found = model(input_ids=left["tokens"]).logits
        torch.testing.assert_close(found, left["logits"], rtol=EXACT, atol=EXACT)


def test_a_resumed_run_is_the_uninterrupted_one(pair: tuple[Path, dict[int, float]], tmp_path: Path) -> None:
    folder, losses = pair
    found = fine_tune(2, folder / f"step-{SAVED_AT}", tmp_path / "out", SAVED_AT, STEPS)
    check_losses(found, {step: losses[step] for step in range(SAVED_AT, STEPS)}, 0)
    last = f"step-{STEPS}"
    check_equal(parameters_in(tmp_path / "out" / last), parameters_in(folder / last))


def test_four_ranks_save_and_two_go_on(
    start: Path, pair: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    _, losses = pair
    found = fine_tune(4, start, tmp_path / "four", 0, SAVED_AT)
    saved = tmp_path / "four" / f"step-{SAVED_AT}"
    found |= fine_tune(2, saved, tmp_path / "two", SAVED_AT, STEPS)
    check_losses(found, losses, EXACT)
