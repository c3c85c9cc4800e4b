"""What the documentation shows is what runs."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.config import load
from penstock.config.bounds import bounded_fields
from penstock.train.config import RunConfig
from tests.support.forked import run_forked

ROOT = Path(__file__).parent.parent
TRAINING = (ROOT / "docs" / "training.md").read_text()


def test_the_example_in_the_text_is_the_file() -> None:
    block = re.search(r"```python\n(.*?)```", TRAINING, re.DOTALL)
    assert block is not None
    assert block[1] == (ROOT / "docs" / "example_training.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_example_runs(processes: int) -> None:
    result = run_forked(processes, program=str(ROOT / "docs" / "example_training.py"))
    assert result.returncode == 0, result.stderr
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", result.stdout)]
    assert len(losses) == 3 and losses[-1] < 0.2 < losses[0]


@pytest.mark.slow
def test_the_model_of_hugging_face_comes_back_as_it_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a plan that is given: to measure and search takes longer than all else."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run_forked(2, tmp_path, "flowmoe", program=str(ROOT / "docs" / "example_hugging_face.py"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\nthe same\n")


def test_every_setting_is_documented() -> None:
    """A row of the table names a section in full once; its other keys may stand behind it."""
    documented = set(re.findall(r"`(?:[a-z]+\.)?([a-z_0-9]+)`", TRAINING))
    for section in fields(RunConfig):
        if section.name == "cluster":  # documented as cluster.*
            continue
        for key in bounded_fields(type(getattr(RunConfig(), section.name))):
            assert key in documented, f"{section.name}.{key}"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configurations_load(path: Path) -> None:
    assert tomllib.loads(path.read_text())
    assert isinstance(load(RunConfig, path), RunConfig)


def test_the_readme_shows_both_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make run" in readme and "make test" in readme
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("README.md", "schedule flowmoe"),
        ("docs/training.md", "schedule flowmoe --sharded-optimizer --all-reduce-chunks 2"),
        ("docs/training.md", "schedule sequential --layers 4 --shard-gradients"),
    ],
)
def test_schedules_that_are_shown_are_real(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, page: str, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert main(command.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = re.search(rf"\$ penstock {command}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert shown is not None
    assert [line for line in shown[1].splitlines() if line not in printed] == []


def test_the_batch_file_is_a_script_that_slurm_and_bash_read() -> None:
    """Slurm stops to read options at the first command; bash checks the rest."""
    file = ROOT / "docs" / "train.sbatch"
    subprocess.run(["bash", "-n", str(file)], check=True)
    head, _, commands = file.read_text().partition("\n\n")
    assert head.startswith("#!/bin/bash\n#SBATCH") and "#SBATCH" not in commands
    for command in re.findall(r"python -m penstock (\w+)", commands):
        assert command in ("doctor", "train")
