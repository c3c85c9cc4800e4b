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
from penstock.data import listing
from penstock.data.listing import parquet_of
from tests.support.hub import hub_of
from tests.support.patience import HANG_S
from tests.support.runs import refused

NAME = "someone/stories"
STORIES = [f"story {number} of several" for number in range(40)]


PROGRAM = """
import os, sys
import datasets
from huggingface_hub import constants

from penstock.cli import main

for offline, name, folder in (line.split() for line in sys.stdin):
    if not os.fork():
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = offline == "offline"
        os._exit(main(["prepare", name, "--out", folder]))
    assert os.wait()[1] == 0
"""
"""Loads what takes seconds once, for processes that each make tokens of a dataset."""


@pytest.mark.slow
def test_a_dataset_is_read_by_its_name_on_the_hub(tmp_path: Path) -> None:
    """Afterwards no hub is needed."""
    folder, named = tmp_path / "data", f"{listing.PREFIX}{NAME}"
    folder.mkdir()
    for split, stories in (("train", STORIES), ("test", STORIES[:3])):
        lines = [json.dumps({"number": number, "text": text}) for number, text in enumerate(stories)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    every, few, later = (tmp_path / name for name in ("every", "few", "later"))
    asked = f"online {named} {every}\nonline {named}?split=test {few}\noffline {named} {later}\n"
    with hub_of(folder, NAME, "datasets") as address:
        own = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", PROGRAM]
        subprocess.run(
            command,
            env=os.environ | own,
            input=asked,
            text=True,
            capture_output=True,
            timeout=HANG_S,
            check=True,
        )
    found = [np.load(out / "tokens-00000.npy").tolist() for out in (every, few, later)]
    tokens = [
        [byte for text in stories for byte in (*text.encode(), 255)] for stories in (STORIES, STORIES[:3])
    ]
    assert found == [*tokens, tokens[0]]


@pytest.mark.parametrize("path", ["", "a/b/c", "someone/stories?rows=3", "?split=train"])
def test_what_names_no_dataset(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parquet_of(f"{listing.PREFIX}{path}")
    assert caught.value.key == "path" and listing.FORM in str(caught.value)


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "is_there", lambda module: module != "datasets")
    with pytest.raises(ConfigError, match="datasets"):
        parquet_of(f"{listing.PREFIX}{NAME}")


@pytest.mark.slow
def test_what_the_hub_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here without a network; a name that is none, another split and no connection end alike."""
    settings = [f"data.path={listing.PREFIX}{NAME}", f"output.dir={tmp_path / 'run'}"]
    assert "data.path" in refused(capsys, "train", "configs/tiny.toml", *settings)
