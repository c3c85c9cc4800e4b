"""The process that starts ranks, when it is asked to stop: the ranks say what that leaves, if they can."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerGroup

from penstock.cli import ranks
from penstock.cli.doctor import ON_CPU, ON_GPUS
from penstock.cli.profile import DEFAULTS
from penstock.cli.run import NOT_BEGUN
from penstock.config import load
from penstock.lab.commands.emulate import Emulation
from penstock.models import ModelConfig
from penstock.models.qwen3_moe import config_json
from penstock.moe import MoEConfig
from penstock.topology.join import ALONE
from penstock.train import launcher
from penstock.train.config import RunConfig
from tests.support.launched import start_launcher
from tests.support.patience import HANG_S
from tests.support.runs import write_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sample", [DEFAULTS, ON_CPU, ON_GPUS])
def test_a_model_that_is_named_has_its_own_sizes(sample: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(ModelConfig(num_layers=6), MoEConfig())))
    eight = replace(ALONE, world_size=8)
    for named in (f"model.config={tmp_path}", "model.preset=flowmoe/bert-large"):
        found, _ = ranks.measured_run(None, [named], sample, eight, None)
        expected = load(RunConfig, None, [named]).resolved(8)
        assert (found.model, found.moe, found.data) == (expected.model, expected.moe, expected.data)
    found, count = ranks.measured_run(
        None, ["model.num_layers=3"], sample, replace(ALONE, world_size=3), None
    )
    assert (found.moe.num_experts, found.model.num_layers, count) == (3, 3, 3)


@pytest.mark.parametrize(("asked", "said"), [([], False), (["parallel.processes=2"], True)])
def test_ranks_that_are_not_started_are_said(
    asked: list[str], said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The samples of commands have a number of processes, which nobody has asked for."""
    emulated = Emulation(nodes=2, devices=2)
    _, count = ranks.measured_run(None, asked, DEFAULTS, None, emulated)
    assert count == 4 and ("parallel.processes = 2 is not used" in capsys.readouterr().err) is said


def ask_afterwards() -> None:
    """Interrupt this process in the moment in which all ranks have ended."""

    def launched(*given: Any, **more: Any) -> launcher.LaunchOutcome:
        outcome = launcher.launch(*given, **more)
        os.kill(os.getpid(), signal.SIGINT)
        return outcome

    vars(ranks)["launch"] = launched


def kill_at_once() -> None:
    """Interrupt this process when it has started the ranks, and kill them before they hear of it."""
    start = launcher._Agent._start_workers

    def started(self: launcher._Agent, worker_group: WorkerGroup) -> dict[int, Any]:
        found: dict[int, Any] = start(self, worker_group)
        os.kill(os.getpid(), signal.SIGINT)
        for rank in self.processes:
            rank.kill()
        return found

    launcher._Agent._start_workers = started  # type: ignore[method-assign]


def test_a_stop_after_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    errors, out = tmp_path / "errors", tmp_path / "out"
    words = ("train", write_config(tmp_path), "train.steps=2")
    process = start_launcher(*words, stderr=errors, stdout=out, meddle=ask_afterwards)
    assert process.wait(timeout=HANG_S) == 0, errors.read_text()
    assert "penstock: " not in errors.read_text() and "checkpoint" in out.read_text()


@pytest.mark.parametrize(
    ("command", "said"), [("train", "stopped; no checkpoint has been written yet"), ("profile", "result")]
)
def test_what_killed_ranks_could_not_say_is_said(tmp_path: Path, command: str, said: str) -> None:
    (tmp_path / "run" / "checkpoints" / "step-00000007").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000007" / "SHA256SUMS").touch()  # of an earlier run
    errors = tmp_path / "errors"
    more = () if command == "train" else ("--out", tmp_path / "cluster.json")
    words = (command, write_config(tmp_path), *more)
    process = start_launcher(*words, stderr=errors, meddle=kill_at_once)
    assert process.wait(timeout=HANG_S) == 130, errors.read_text()
    lines = [line for line in errors.read_text().splitlines() if line.startswith("penstock: ")]
    assert len(lines) == 1 and said in lines[0] and NOT_BEGUN not in lines[0], lines
