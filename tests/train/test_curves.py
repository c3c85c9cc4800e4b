"""Metrics for Weights & Biases: without the package, and which run is gone on with."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.config import ConfigError, load
from penstock.train.config import RunConfig
from penstock.train.metrics import ID_FILE, _id_in
from tests.support.runs import refused, write_config


@pytest.mark.skipif(find_spec("wandb") is not None, reason="the package is installed here")
@pytest.mark.parametrize("mode", ["true", "offline"])
def test_a_missing_package_is_said_before_anything_starts(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "train", write_config(tmp_path), f"metrics.wandb={mode}")
    assert said.startswith("penstock: metrics.wandb = ") and "pip install 'penstock[wandb]'" in said
    assert not (tmp_path / "run").exists()


def test_it_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert load(RunConfig, write_config(tmp_path), []).metrics.wandb is False


def test_a_run_that_resumes_keeps_its_number(tmp_path: Path) -> None:
    first = _id_in(tmp_path, resumes=False)
    assert _id_in(tmp_path, resumes=True) == first
    second = _id_in(tmp_path, resumes=False)
    assert second != first and (tmp_path / ID_FILE).read_text() == f"{second}\n"


@pytest.mark.parametrize("kind", ["link", "pipe", "large"])
def test_a_number_comes_from_no_other_file(tmp_path: Path, kind: str) -> None:
    """It is sent to a server: a link could lead to what nobody else is to read."""
    (tmp_path / "mine").write_text("a secret")
    if kind == "link":
        (tmp_path / ID_FILE).symlink_to(tmp_path / "mine")
    elif kind == "pipe":
        os.mkfifo(tmp_path / ID_FILE)
    else:
        (tmp_path / ID_FILE).write_text("x" * 100_000)
    with pytest.raises(ConfigError) as caught:
        _id_in(tmp_path, resumes=True)
    assert caught.value.key == str(tmp_path / ID_FILE)
