"""Files are written as wholes, and never into what a link leads to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.writing import (
    Draft,
    LineFile,
    exchange,
    make_durable,
    open_lock,
    remove_drafts,
    replacing,
    try_to_write,
    write_setting,
    write_whole,
)
from tests.support.killed import left_by_kills

Make = Callable[[Path, Path], None]


def soft(path: Path, file: Path) -> None:
    path.symlink_to(file)


def hard(path: Path, file: Path) -> None:
    path.hardlink_to(file)


def pipe(path: Path, file: Path) -> None:
    del file
    os.mkfifo(path)


def dangling(path: Path, file: Path) -> None:
    path.symlink_to(file.with_name("nowhere"))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A file that has nothing to do with what is written."""
    path = tmp_path / "other"
    path.write_text("mine")
    return path


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("make", [soft, hard, pipe, dangling])
def test_what_has_the_name_is_replaced_and_nothing_else(tmp_path: Path, other: Path, make: Make) -> None:
    path = tmp_path / "new"
    make(path, other)
    write_whole(path, "new")
    assert path.is_file() and not path.is_symlink() and path.read_text() == "new"
    assert other.read_text() == "mine" and names_in(tmp_path) == {"new", "other"}


def test_a_folder_of_that_name_stays(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "new", "new")
    assert names_in(tmp_path) == {"new"}


def test_a_file_that_is_not_finished_changes_nothing(tmp_path: Path, other: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing(other) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert other.read_text() == "mine" and names_in(tmp_path) == {"other"}


def test_a_disk_without_room_changes_nothing(tmp_path: Path, other: Path) -> None:
    """A device that is always full stands for a disk that is."""
    draft = Draft(other)
    os.dup2(full := os.open("/dev/full", os.O_WRONLY), draft.file.fileno())
    os.close(full)
    draft.file.write(b"new")
    with pytest.raises(OSError, match="No space left"):
        draft.settle()
    draft.discard()
    assert other.read_text() == "mine" and names_in(tmp_path) == {"other"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no folder without fsync")
def test_a_folder_that_cannot_be_waited_for_is_no_error() -> None:
    make_durable(Path("/proc"))


def test_two_that_write_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with replacing(path) as first, replacing(path) as second:
        for file in (first, second, first, second):
            file.write(b"first" if file is first else b"2nd")
    assert path.read_bytes() == b"firstfirst"


def test_a_file_goes_on_after_it_has_its_name(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "new")
    draft.file.write(b"one")
    with draft.settle(durable=True) as file:
        assert (tmp_path / "new").read_bytes() == b"one"
        file.write(b"two")
    assert (tmp_path / "new").read_bytes() == b"onetwo"


def test_lines_follow_what_others_have_left_of_the_file(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "lines", [b"one\n"])
    lines.add(b"two\n")
    os.truncate(lines.path, 0)
    lines.add(b"three\n")
    with lines.path.open("ab") as file:
        file.write(b"four\n")
    lines.add(b"five\n")
    assert lines.path.read_bytes() == b"three\nfour\nfive\n"
    lines.path.unlink()
    lines.renew()
    assert lines.path.read_bytes() == b"three\nfour\nfive\n"
    lines.close()


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("old")
    copies = left_by_kills(folder, lambda: write_whole(folder / "file", "new", durable=True), tmp_path)
    found = [(copy / "file").read_text() for copy in copies]
    assert (found[0], found[-1]) == ("old", "new") and set(found) == {"old", "new"} and len(found) > 4
    for copy in copies:
        remove_drafts(copy)
        assert names_in(copy) == {"file"}


def test_only_drafts_are_removed(tmp_path: Path) -> None:
    own = {"notes.part", "a.12345678.txt", "b.1234567g.part", ".12345678.part"}
    for name in own:
        (tmp_path / name).touch()
    left = Draft(tmp_path / "plan.json")
    remove_drafts(tmp_path)
    assert names_in(tmp_path) == own
    left.file.close()


# ---- locks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [hard, lambda path, other: path.write_bytes(other.read_bytes())])
def test_a_lock_keeps_what_it_holds(tmp_path: Path, other: Path, make: Make) -> None:
    make(tmp_path / ".lock", other)
    open_lock(tmp_path / ".lock").close()
    assert other.read_text() == "mine" and (tmp_path / ".lock").read_text() == "mine"


@pytest.mark.parametrize("make", [soft, dangling, pipe, lambda path, other: path.mkdir()])
def test_what_is_no_file_is_no_lock(tmp_path: Path, other: Path, make: Make) -> None:
    make(tmp_path / ".lock", other)
    before = names_in(tmp_path)
    with pytest.raises(OSError) as caught:
        open_lock(tmp_path / ".lock")
    assert caught.value.strerror
    assert other.read_text() == "mine" and names_in(tmp_path) == before


def test_a_lock_is_made_unless_it_is_only_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_lock(tmp_path / ".lock", makes=False)
    open_lock(tmp_path / ".lock").close()
    open_lock(tmp_path / ".lock", makes=False).close()


# ---- the rest ----------------------------------------------------------------------------------------------


def test_two_folders_change_their_names_at_once(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "first", tmp_path / "second"):
        pytest.skip("this file system cannot exchange names")
    assert names_in(tmp_path / "first") == {"second"} and names_in(tmp_path / "second") == {"first"}


def test_an_exchange_that_is_impossible_is_told(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    assert not exchange(tmp_path / "first", tmp_path / "second")
    assert names_in(tmp_path) == {"first"}


def test_a_trial_leaves_nothing(tmp_path: Path) -> None:
    try_to_write(tmp_path, "plan.json")
    assert not names_in(tmp_path)
    with pytest.raises(OSError, match="too long"):
        try_to_write(tmp_path, "x" * 250)


def test_a_setting_of_the_kernel_is_never_a_new_file(tmp_path: Path, other: Path) -> None:
    write_setting(Path("/proc/self/comm"), "penstock")
    assert Path("/proc/self/comm").read_text() == "penstock\n"
    with pytest.raises(FileNotFoundError):
        write_setting(tmp_path / "new", "1")
    soft(tmp_path / "link", other)
    with pytest.raises(OSError):
        write_setting(tmp_path / "link", "1")
    assert other.read_text() == "mine"
