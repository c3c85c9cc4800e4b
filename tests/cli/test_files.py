"""`--out` of plan and profile: what cannot be written is refused before the work, and nothing is touched."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from penstock.cli.out import check_folder, check_out, save_out
from penstock.config import ConfigError
from penstock.plan.plan_config import PlanConfig
from penstock.train.output import OutputFolder
from tests.support.cli import Cli

T = TypeVar("T")

PLAN = (
    *("plan", "--model", "flowmoe/gpt2-tiny", "--cluster", "flowmoe-cluster-2"),
    *("--layers", "1", "--batch", "2"),
)
PROFILE = ("profile",)

BAD = [
    ("", "is a folder"),
    ("folder", "is a folder"),
    ("file/plan.json", "file is a file, not a folder"),
    ("file/deep/plan.json", "file is a file, not a folder"),
    ("x" * 300, "cannot be written (File name too long)"),
    ("x" * 250, "cannot be written (File name too long)"),
    ("folder/" + "x" * 300 + "/plan.json", "cannot be written (File name too long)"),
    ("/dev/null", "is not a regular file"),
    ("/proc/plan.json", "cannot be written (No such file or directory)"),
]
"""Places below a folder, unless they are absolute. Who runs tests as root may write in any real folder."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    return tmp_path


def contents(folder: Path) -> dict[str, str | None]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("command", [PLAN, PROFILE], ids=["plan", "profile"])
@pytest.mark.parametrize(("place", "why"), BAD)
def test_a_place_that_cannot_be_written_is_refused(
    folder: Path, cli: Cli, command: tuple[str, ...], place: str, why: str
) -> None:
    before = contents(folder)
    said = cli.refuses([*command, "--out", folder / place])
    assert said.startswith("penstock: --out = ") and why in said and "Name a file" in said
    assert contents(folder) == before


def test_the_place_is_tried_and_left_as_it_was(folder: Path) -> None:
    before = contents(folder)
    file = folder / "file"
    changed_ns = file.stat().st_mtime_ns
    assert check_out(file, "plan.json") == file
    assert check_out(folder / "new.json", "plan.json") == folder / "new.json"
    assert (contents(folder), file.stat().st_mtime_ns) == (before, changed_ns)
    check_out(folder / "deep" / "er" / "plan.json", "plan.json")
    assert contents(folder) == {**before, "deep": None, "deep/er": None}


@pytest.mark.parametrize("command", [PROFILE, ("bench",)], ids=["profile", "bench"])
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file", "is not a folder"),
        ("file/deep", "cannot be written to (Not a directory)"),
        ("/proc/figures", "cannot be written to (No such file or directory)"),
    ],
)
def test_a_folder_of_figures_is_tried_before_anything_is_measured(
    folder: Path, cli: Cli, command: tuple[str, ...], place: str, why: str
) -> None:
    before = contents(folder)
    said = cli.refuses([*command, "--plot", folder / place])
    assert said.startswith("penstock: --plot = ") and why in said and "Name a folder" in said
    assert contents(folder) == before


def test_no_empty_file_is_taken_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is always full stands for a disk that is."""

    opened = os.open
    monkeypatch.setattr("penstock.writing.os.open", lambda *_: opened("/dev/full", os.O_RDWR))
    with pytest.raises(ConfigError, match=r"--out = .*cannot be written \(No space left on device\)"):
        check_out(Path("plan.json"), "plan.json")
    with pytest.raises(ConfigError, match=r"--plot = .*cannot be written to \(No space left on device\)"):
        check_folder(Path())


def test_a_name_alone_is_a_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = contents(folder)
    check_out(Path("plan.json"), "plan.json")
    assert contents(folder) == before


def test_what_becomes_impossible_meanwhile_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def save(path: Path) -> None:
        path.write_text("found")

    assert save_out(save, folder / "plan.json") and (folder / "plan.json").read_text() == "found"
    assert not save_out(save, folder / "folder")
    assert f"{folder / 'folder'} could not be written: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 0.0])
def test_a_run_measures_for_some_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"profile_s = .*must end"):
        PlanConfig(profile_s=seconds)


TOO_LONG = "x" * 300


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("plan", "--model", "pro-prophet/moe-gpt-s", "--cluster", TOO_LONG), "File name too long"),
        (("plan", "--model", "pro-prophet/moe-gpt-s", "--cluster", f"{TOO_LONG}.json"), "File name too long"),
        ((*PLAN, "--routing", TOO_LONG), "--routing"),
        (("plan", TOO_LONG, "--cluster", "flowmoe-cluster-2"), "File name too long"),
        (("train", TOO_LONG), "File name too long"),
        (("report", TOO_LONG), "there is no such folder"),
        (("prepare", __file__, "--tokenizer", TOO_LONG, "--out", "tokens"), "File name too long"),
    ],
    ids=["cluster", "cluster file", "routing", "plan", "train", "report", "tokenizer"],
)
def test_a_name_that_no_file_can_have_is_refused_in_a_line(
    cli: Cli, command: tuple[str, ...], why: str
) -> None:
    said = cli.refuses(command)
    assert said.count("\n") <= 1 and why in said


def test_what_lies_in_a_locked_folder_is_refused_in_a_line(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who runs tests as root may look into any real one."""
    locked = folder / "folder"

    def refusing(call: Callable[..., T]) -> Callable[..., T]:
        def refused(path: Path, *given: object, **more: object) -> T:
            if locked in Path(path).parents:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *given, **more)

        return refused

    monkeypatch.setattr(Path, "stat", refusing(Path.stat))
    monkeypatch.setattr(os, "open", refusing(os.open))
    assert "metrics.jsonl: cannot be read (Permission denied)" in cli.refuses(["report", locked])
    words = ["plan", "--model", f"{locked}/model", "--cluster", "flowmoe-cluster-2"]
    assert f"{locked}/model" in cli.refuses(words)


def test_an_output_folder_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="File name too long"), OutputFolder(Path(TOO_LONG), keep=False):
        pass
