"""Configurations by name, wherever one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import ConfigError, load
from penstock.train.config import RunConfig

ROOT = Path(__file__).parents[2]


def test_a_shipped_configuration_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(RunConfig, Path("tiny")) == load(RunConfig, ROOT / "configs" / "tiny.toml")


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_text("[train]\nsteps = 7\n")
    assert load(RunConfig, Path("tiny")).train.steps == 7


def test_a_folder_of_that_name_is_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's, perhaps."""
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert load(RunConfig, Path("tiny")) == load(RunConfig, ROOT / "configs" / "tiny.toml")


@pytest.mark.parametrize("name", ["small", "configs/tiny.toml", "elsewhere/tiny"])
def test_nothing_else_is_guessed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="Check the path"):
        load(RunConfig, Path(name))
