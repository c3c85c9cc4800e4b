"""`penstock --import MODULE`: commands know what a user's own module registers, on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.own import own_modules
from tests.support.cli import Cli
from tests.support.runs import clean_environ, command, write_config

SCHEDULES = """
from penstock.schedule import register_schedule
from penstock.schedule.flowmoe import FlowMoE


class Mine(FlowMoE):
    name = "mine"


register_schedule(Mine())
"""


def run_beside(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `penstock` in the folder, as one does who has written a module there."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=clean_environ(), cwd=folder, check=False
    )


@pytest.mark.slow
def test_ranks_train_by_a_schedule_of_a_module_of_this_folder(tmp_path: Path) -> None:
    (tmp_path / "my_schedules.py").write_text(SCHEDULES)
    settings = ("schedule.name=mine", "train.steps=1", "parallel.processes=2")
    config = write_config(tmp_path)
    done = run_beside(tmp_path, "--import", "my_schedules", "train", config, "--json", *settings)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schedule"] == "mine"


@pytest.mark.slow
def test_commands_without_torch_know_it_too(tmp_path: Path) -> None:
    (tmp_path / "my_schedules.py").write_text(SCHEDULES)
    script = Path(sys.executable).with_name("penstock")  # which, unlike `python -m`, does not look here
    words: list[str | Path] = [script, "list", "schedules", "--json", "--import=my_schedules"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "mine" in {row["name"] for row in json.loads(done.stdout)["schedules"]}


@pytest.mark.parametrize(
    ("text", "name", "shown"),
    [
        (None, "nowhere", '--import = "nowhere"'),
        (None, "", '--import = ""'),
        ("import numpyy", "broken", "ModuleNotFoundError: No module named 'numpyy'"),
        ("1 / 0", "broken", "line 1"),
        ("def f(:", "broken", "SyntaxError"),
        ("raise SystemExit(3)", "broken", "SystemExit"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
    text: str | None,
    name: str,
    shown: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    assert shown in cli.refuses(["--import", name, "list"])


def test_words_of_another_program_stay() -> None:
    assert own_modules(
        ["--import=a", "emulate", "exec", "--import", "b", "1", "--", "x", "--import", "c"]
    ) == (
        ["a", "b"],
        ["emulate", "exec", "1", "--", "x", "--import", "c"],
    )
