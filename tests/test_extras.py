"""What an installation may lack: Penstock works without it, or says in a sentence what to install."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.config import ConfigError, load
from penstock.data.tokenizer import open_tokenizer
from penstock.extras import EXTRAS, install, is_there, needs
from penstock.train.config import RunConfig
from penstock.train.metrics import JsonLines, open_logs

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_MODELS = ("penstock.adapt.outputs", "penstock.adapt.trained")
"""Modules that only those import who have models of transformers."""

HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in {hidden} else find(name, path, target)
PathFinder.find_spec = staticmethod(find_others)
"""
IMPORT_ALL = """
import pkgutil, importlib, penstock
for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
    if module.name not in {left} and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """As if it were not installed."""
    monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.soak
def test_every_module_can_be_imported_without_extras() -> None:
    """Nor do they need what only developers have."""
    hidden = {*EXTRAS, "accelerate", "hypothesis", "ortools", "pandas", "plotly", "pytest", "sklearn"}
    code = HIDE.format(hidden=hidden) + IMPORT_ALL.format(left=FOR_MODELS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_extra_is_one_of_the_installation() -> None:
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.values():
        named = extras[extra][0]
        assert re.match(r"[\w-]+", named)[0] == package.split()[0]  # type: ignore[index]  # names match
        assert extra in re.findall(r"penstock\[(.*?)\]", extras["dev"][0])[0].split(",")


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_there("matplotlib")
    hide(monkeypatch, "matplotlib")
    assert not is_there("matplotlib")
    assert f"It {needs('matplotlib')}. {install('matplotlib')}" == (
        "It needs the package matplotlib. Install it: pip install 'penstock[plots]'."
    )


def test_a_tuner_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "bayes_opt")
    with pytest.raises(ConfigError, match=r"plan\.tuner.*bayesian-optimization.*penstock\[tuning\]"):
        load(RunConfig, None, ["plan.tuner=bayesian"])
    assert load(RunConfig, None, ["plan.tuner=grid"]).plan.tuner == "grid"


def test_a_picture_of_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "matplotlib")
    assert main(["profile", "--out", str(tmp_path / "c.json"), "--plot", str(tmp_path)]) == 2
    assert re.search(r"--plot.* needs the package matplotlib.*penstock\[plots\]", capsys.readouterr().err)


def test_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "tokenizers")
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"needs the package tokenizers.*penstock\[tokenizers\]"):
        open_tokenizer(str(file))


def test_curves_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence is the trainer's: tests/test_wheel.py reads it."""
    hide(monkeypatch, "tensorboard")
    config = load(RunConfig, None, [f"output.dir={tmp_path}"])
    assert config.output.tensorboard and [type(log) for log in open_logs(config, (0,), 0)] == [JsonLines]
    assert not (tmp_path / "tensorboard").exists()


def test_models_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "transformers")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert re.search(r"needs the package transformers 5.*penstock\[transformers\]", capsys.readouterr().err)
