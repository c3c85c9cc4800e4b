"""Runs of commands, and what can be known of them from outside."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.support.forked import run_forked
from tests.support.launched import start_launcher
from tests.support.patience import HANG_S
from tests.support.runs import Running, losses, metrics_of, wait_until, write_config

DONE: Final = 0
"""The run has ended, or was asked to stop and has saved a checkpoint; see docs/training.md for all codes."""

FAILED: Final = 1
INTERRUPTED: Final = 130

SAMPLES: Final = 8
"""Samples of every step, whatever the number of ranks."""

PATIENT: Final = "parallel.timeout_s=3600"
"""A setting of runs that are to end at once: what ends only when patience is over counts as a hang."""


@dataclass(frozen=True)
class Trained:
    """A run of `penstock train` that has ended well.

    Attributes:
        folder: its `output.dir`.
        found: the object that `--json` prints.
        said: its standard error.
    """

    folder: Path
    found: Mapping[str, Any]
    said: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All lines of the file of metrics."""
        return metrics_of(Path(self.found["outputs"]["metrics"]).parent)

    @property
    def losses(self) -> dict[int, float]:
        """Of all steps, by number."""
        return losses(Path(self.found["outputs"]["metrics"]).parent)

    def parameters(self) -> dict[str, Tensor]:
        """Return all parameters as the newest checkpoint has them, for transformers and others."""
        newest = max((self.folder / "checkpoints").glob("step-*"))
        found: dict[str, Tensor] = {}
        for path in newest.glob("model-*.safetensors"):
            found |= load_file(path)
        assert found, "nothing was saved"
        return found


def on_ranks(ranks: int) -> list[str]:
    """Return the settings of a run on so many ranks, which have the same samples in a step as any number."""
    return [f"parallel.processes={ranks}", f"data.batch_per_device={SAMPLES // ranks}"]


def config_in(folder: Path) -> Path:
    """Return the configuration in a folder, which is written if it is not there."""
    path = folder / "tiny.toml"
    return path if path.exists() else write_config(folder)


def train(folder: Path, ranks: int, *settings: str, name: str = "run") -> Trained:
    """Train on ranks that join each other as those of torchrun do."""
    words = [*on_ranks(ranks), f"output.dir={folder / name}", *settings]
    return _ended(folder / name, run_forked(ranks, "train", config_in(folder), "--json", *words))


def train_by_command(folder: Path, ranks: int, *settings: str, name: str = "run") -> Trained:
    """Train by the command alone, which starts the ranks."""
    words = ["train", str(config_in(folder)), "--json", *on_ranks(ranks), *settings]
    out, errors = folder / "out", folder / "errors"
    process = start_launcher(*words, f"output.dir={folder / name}", stdout=out, stderr=errors)
    code = process.wait(timeout=HANG_S)
    done = subprocess.CompletedProcess(words, code, out.read_text(), errors.read_text())
    return _ended(folder / name, done)


def _ended(folder: Path, result: subprocess.CompletedProcess[str]) -> Trained:
    assert result.returncode == DONE, result.stderr
    return Trained(folder, json.loads(result.stdout), result.stderr)


def check_losses(found: Mapping[int, float], wanted: Mapping[int, float], tolerance: float) -> None:
    """Assert that the same steps have the same losses, in every bit with a tolerance of 0."""
    assert found == (pytest.approx(wanted, rel=tolerance, abs=0) if tolerance else wanted)


def check_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Assert that tensors are the same in every bit."""
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not found[name].equal(tensor)] == []


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return text.strip().splitlines()[-1]


def wait_for_steps(process: Running, folder: Path, steps: int) -> None:
    """Wait until a run has done so many steps."""
    wait_until(lambda: len(metrics_of(folder)) >= steps, process)
