"""Texts that are named as on the hub: from a hub on this machine, and then from the cache without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.config import ConfigError
from penstock.data import files
from penstock.data.files import parquet_of
from tests.support.hub import hub_of
from tests.support.patience import HANG_S

NAME = "someone/stories"
STORIES = [f"story {number} of several" for number in range(40)]


def prepared(home: Path, name: str, **environ: str) -> list[int]:
    """The tokens that `penstock prepare` makes of a dataset, in a process of its own."""
    out = home / f"tokens-{len(list(home.iterdir()))}"
    command = [sys.executable, "-m", "penstock", "prepare", f"{files.PREFIX}{name}", "--out", str(out)]
    given = {**os.environ, "HF_HOME": str(home / "hf"), **environ}
    subprocess.run(command, env=given, capture_output=True, timeout=HANG_S, check=True)
    found: list[int] = np.load(out / "tokens-00000.npy").tolist()
    return found


@pytest.mark.slow
def test_a_dataset_is_read_by_its_name_on_the_hub(tmp_path: Path) -> None:
    """Afterwards no hub is needed."""
    folder, home = tmp_path / "data", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    for split, stories in (("train", STORIES), ("test", STORIES[:3])):
        lines = [json.dumps({"number": number, "text": text}) for number, text in enumerate(stories)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    with hub_of(folder, NAME, "datasets") as address:
        online = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        every = prepared(home, NAME, **online)
        few = prepared(home, f"{NAME}?split=test", **online)
    assert every == [byte for text in STORIES for byte in (*text.encode(), 255)]
    assert few == [byte for text in STORIES[:3] for byte in (*text.encode(), 255)]
    assert prepared(home, NAME, HF_HUB_OFFLINE="1") == every


@pytest.mark.parametrize("path", ["", "a/b/c", "someone/stories?rows=3", "?split=train"])
def test_what_names_no_dataset(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parquet_of(f"{files.PREFIX}{path}")
    assert caught.value.key == "path" and files.FORM in str(caught.value)


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "is_there", lambda module: module != "datasets")
    with pytest.raises(ConfigError, match="datasets"):
        parquet_of(f"{files.PREFIX}{NAME}")


@pytest.mark.slow
def test_what_the_hub_does_not_have(tmp_path: Path) -> None:
    """Here without a network; a name that is none, another split and no connection end alike."""
    command = [sys.executable, "-m", "penstock", "train", "configs/tiny.toml"]
    settings = [f"data.path={files.PREFIX}{NAME}", f"output.dir={tmp_path / 'run'}"]
    given = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *settings], env=given, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 2 and "data.path" in done.stderr and "Traceback" not in done.stderr
