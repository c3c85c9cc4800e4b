"""The folder of a run: one run at a time, and an earlier run is moved aside, never overwritten."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from penstock.config import ConfigError
from penstock.train.output import (
    CONFIG,
    FOLDERS,
    LOCK,
    MARKS,
    OutputFolder,
    check_output,
    keep_config,
)
from penstock.writing import Draft
from tests.support.killed import left_by_kills

HOLD = """
import sys
from pathlib import Path
from penstock.train.output import OutputFolder
with OutputFolder(Path(sys.argv[1]), keep=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def leave_run(folder: Path, text: str = "earlier") -> None:
    """What a run leaves, and a file beside it that no run wrote."""
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "notes.txt").write_text(f"notes of {text}")


def test_foreign_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with OutputFolder(folder / "deeper", keep=False) as output:  # made with its parents
        assert output.moved_to is None
    (folder / "deeper" / LOCK).unlink()
    (folder / "deeper" / "notes.txt").write_text("mine")
    with OutputFolder(folder, keep=False) as output:
        assert output.moved_to is None
    assert (folder / "deeper" / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("marks", [*((mark,) for mark in MARKS), (LOCK, CONFIG)])
def test_every_mark_of_a_run_moves_the_folder(tmp_path: Path, marks: tuple[str, ...]) -> None:
    """Also of one that had only begun."""
    folder = tmp_path / "run"
    folder.mkdir()
    for mark in marks:
        (folder / mark).write_text("")
    with OutputFolder(folder, keep=False) as output:
        assert output.moved_to == tmp_path / "run.1"
        assert [path.name for path in folder.iterdir()] == [LOCK]
    assert all((tmp_path / "run.1" / mark).exists() for mark in marks)


def test_the_folder_of_a_project_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("[project]")
    with pytest.raises(ConfigError, match="was not written by a run"), OutputFolder(tmp_path, keep=False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG]


def test_earlier_runs_are_counted_and_moved_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number, text in ((1, "first"), (2, "second")):
        leave_run(folder, text)
        with OutputFolder(folder, keep=False) as output:
            assert output.moved_to == tmp_path / f"run.{number}"
    for number, text in ((1, "first"), (2, "second")):
        aside = tmp_path / f"run.{number}"
        assert (aside / "metrics.jsonl").read_text() == text
        assert (aside / "notes.txt").read_text() == f"notes of {text}"
        assert (aside / "checkpoints" / "step-00000003").is_dir()


def test_a_run_that_continues_finds_it_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    leave_run(folder)
    with OutputFolder(folder, keep=True) as output:
        assert output.moved_to is None
    assert (folder / "metrics.jsonl").read_text() == "earlier"
    assert not (tmp_path / "run.1").exists()


@pytest.mark.parametrize("keep", [False, True])
def test_a_held_folder_is_refused_and_free_afterwards(tmp_path: Path, keep: bool) -> None:
    folder = tmp_path / "run"
    with OutputFolder(folder, keep=False):
        (folder / "metrics.jsonl").write_text("going on")
        for start in (OutputFolder(folder, keep=keep).__enter__, partial(check_output, folder, keep=keep)):
            with pytest.raises(ConfigError, match=r"output\.dir.*another run is writing there") as caught:
                start()
            assert str(folder) in str(caught.value)
        assert {path.name for path in folder.iterdir()} == {LOCK, "metrics.jsonl"}
        assert (folder / "metrics.jsonl").read_text() == "going on"
        assert not (tmp_path / "run.1").exists()
    with OutputFolder(folder, keep=keep) as output:
        assert (output.moved_to is None) is keep


def test_where_there_are_no_locks_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on Lustre that is mounted without them."""

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unknown)
    for _ in range(2):
        check_output(tmp_path / "run", keep=False)
        with OutputFolder(tmp_path / "run", keep=False) as output:
            leave_run(tmp_path / "run")
            assert not output.is_lost
    assert (tmp_path / "run.1" / "notes.txt").exists() and "no locks" in caplog.text


def test_no_other_start_comes_in_while_a_run_is_moved_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    leave_run(folder)

    class Slow(OutputFolder):
        def _check_movable(self) -> None:
            with pytest.raises(ConfigError, match="another run is writing there"):
                OutputFolder(folder, keep=True).__enter__()
            super()._check_movable()

    with Slow(folder, keep=False) as output:
        assert output.moved_to == tmp_path / "run.1"
        assert [path.name for path in folder.iterdir()] == [LOCK]


def test_the_lock_of_a_folder_that_was_moved_aside_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start has opened the lock when another moves it away and is done with it."""
    folder = tmp_path / "run"
    leave_run(folder)
    first, flock = OutputFolder(folder, keep=False), fcntl.flock

    def late(file: IO[str], operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.__enter__()
        (folder / "metrics.jsonl").write_text("going on")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ConfigError, match="another run is writing there"):
        OutputFolder(folder, keep=False).__enter__()
    assert (folder / "metrics.jsonl").read_text() == "going on"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1"]
    first.__exit__(None, None, None)


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Also when it is killed: nobody has to remove anything by hand."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another run is writing there"):
            OutputFolder(folder, keep=False).__enter__()
        holder.kill()
        holder.wait()
    with OutputFolder(folder, keep=False):
        pass


def test_the_lock_is_released_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), OutputFolder(tmp_path / "run", keep=False):
        raise ZeroDivisionError
    with OutputFolder(tmp_path / "run", keep=False):
        pass


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused_at_once(tmp_path: Path, keep: bool, kind: str) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.write_text("mine")
    if kind == "pipe":
        os.mkfifo(folder / LOCK)
    elif kind == "folder":
        (folder / LOCK).mkdir()
    else:
        (folder / LOCK).symlink_to(other if kind == "link" else tmp_path / "nowhere")
    for start in (OutputFolder(folder, keep=keep).check, OutputFolder(folder, keep=keep).__enter__):
        with pytest.raises(ConfigError) as caught:
            start()
        assert caught.value.key == "output.dir"
    assert other.read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_a_lock_that_is_another_file_too_keeps_what_it_holds(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.write_text("mine")
    (folder / LOCK).hardlink_to(other)
    with OutputFolder(folder, keep=True):
        assert other.read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "file"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_run_does_not_go_on_in_another_folder(tmp_path: Path, name: str, kind: str) -> None:
    """A run removes checkpoints, also those of another run, if a link leads to them."""
    folder, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    leave_run(folder)
    (folder / "checkpoints").rename(tmp_path / "kept")
    (folder / name).symlink_to(other) if kind == "link" else (folder / name).touch()
    for start in (OutputFolder(folder, keep=True).check, OutputFolder(folder, keep=True).__enter__):
        with pytest.raises(ConfigError) as caught:
            start()
        assert caught.value.key == "output.dir" and name in caught.value.why
    with OutputFolder(folder, keep=False) as output:  # moved aside with all of it
        assert output.moved_to is not None
    assert not list(other.iterdir())


def test_what_killed_runs_were_writing_goes(tmp_path: Path) -> None:
    leave_run(folder := tmp_path / "run")
    Draft(folder / "trace.json").file.close()
    with OutputFolder(folder, keep=True):
        assert sorted(path.name for path in folder.iterdir()) == [
            LOCK,
            "checkpoints",
            "metrics.jsonl",
            "notes.txt",
        ]


@pytest.mark.parametrize("below", [".", "checkpoints/step-00000003"])
def test_the_folder_you_are_in_is_not_moved_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    folder = tmp_path / "run"
    leave_run(folder)
    monkeypatch.chdir(folder / below)
    with pytest.raises(ConfigError, match=r"output\.dir.*your current working directory"):
        OutputFolder(folder, keep=False).__enter__()
    assert (folder / "metrics.jsonl").read_text() == "earlier"
    with OutputFolder(folder, keep=True):  # the lock is free, too
        pass


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_in_the_way_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"output\.dir.*cannot be written to"):
        OutputFolder(tmp_path / "file" / below, keep=False).__enter__()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_kill_leaves_some_configuration(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    keep_config(folder, "a = 1\n", 0)
    for copy in left_by_kills(folder, lambda: keep_config(folder, "a = 2\n", 3), tmp_path / "copies"):
        assert (copy / CONFIG).read_text() in ("a = 1\n", "a = 2\n")
    assert (folder / CONFIG).read_text() == "a = 2\n"
    assert (folder / "config-until-step-00000003.toml").read_text() == "a = 1\n"


def test_a_pipe_in_place_of_the_configuration_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CONFIG)
    with pytest.raises(ConfigError) as caught:
        keep_config(tmp_path, "a = 1\n", 0)
    assert caught.value.key == str(tmp_path / CONFIG)


# ---- before anything is measured ---------------------------------------------------------------------------


def test_a_trial_keeps_no_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of another start is under way when a run wants the folder, and is over when it asks again."""
    folder = tmp_path / "run"
    folder.mkdir()
    trial = (folder / LOCK).open("w+")
    fcntl.flock(trial, fcntl.LOCK_SH)
    monkeypatch.setattr("penstock.train.output.time.sleep", lambda _: trial.close())
    check_output(folder, keep=False)
    with OutputFolder(folder, keep=False):
        assert trial.closed


@pytest.mark.parametrize("mark", [CONFIG, "cwd"])
def test_a_folder_that_is_something_else_is_found_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    if mark == CONFIG:
        (tmp_path / CONFIG).write_text("[project]")
    else:
        leave_run(tmp_path)
        monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"not written by a run|working directory"):
        check_output(tmp_path, keep=False)
    check_output(tmp_path, keep=True)
    assert sorted(tmp_path.rglob("*")) == before


MOUNTED = """
import subprocess, sys
from pathlib import Path
from penstock.config import ConfigError
from penstock.train.output import check_output
subprocess.run(["mount", *{mount!r}, sys.argv[1]], check=True)
{after}
try:
    check_output(Path(sys.argv[1], *{below!r}), keep=False)
except ConfigError as error:
    print(error.why)
"""
FULL = """
try:
    Path(sys.argv[1], "filler").write_bytes(bytes(1 << 20))
except OSError:
    pass
"""
EARLIER = 'Path(sys.argv[1], "run").mkdir(); Path(sys.argv[1], "run", "trace.json").touch()'
TMPFS, FROZEN = ("-t", "tmpfs", "-o", "size=64k", "none"), ("-t", "tmpfs", "-o", "size=1m", "none")
FREEZE = 'subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)'


def may_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return (
        sys.platform == "linux" and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not may_mount(), reason="mounts file systems of its own")
@pytest.mark.parametrize(
    ("mount", "after", "below", "why"),
    [
        (TMPFS, FULL, (), "cannot be written to (No space left on device)"),
        (TMPFS, FULL, ("run",), "no folder can be created there (No space left on device)"),
        (FROZEN, FREEZE, (), "cannot be written to (Read-only file system)"),
        (FROZEN, FREEZE, ("a", "b"), "no folder can be created there (Read-only file system)"),
        (
            FROZEN,
            f'Path(sys.argv[1], "trace.json").touch(); {EARLIER}',
            (),
            "holds an earlier run that cannot be moved aside: a file system is mounted there",
        ),
        (
            FROZEN,
            f'{EARLIER}; subprocess.run(["mount", "-t", "tmpfs", "none", sys.argv[1] + "/run"], check=True); '
            f'Path(sys.argv[1], "run", "trace.json").touch(); {FREEZE}',
            ("run",),
            "holds an earlier run that cannot be moved aside: a file system is mounted there",
        ),
    ],
    ids=["full", "full, below", "read-only", "read-only, below", "mounted", "mounted below read-only"],
)
def test_disks_that_no_run_could_use(
    tmp_path: Path, mount: tuple[str, ...], after: str, below: tuple[str, ...], why: str
) -> None:
    """In a namespace of mounts that ends with the process."""
    program = MOUNTED.format(mount=mount, after=after, below=below)
    command = ["unshare", "--mount", sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (why, "")


@pytest.mark.parametrize("below", [".", "a", "a/b/c"])
def test_trying_a_folder_leaves_nothing_behind(tmp_path: Path, below: str) -> None:
    leave_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    check_output(tmp_path / below, keep=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/proc/x", "no folder can be created there (No such file or directory)"),
        ("/proc/x/y", "no folder can be created there (No such file or directory)"),
        ("/proc", "cannot be written to (No such file or directory)"),
        ("/dev/null", "cannot be written to (Not a directory)"),
        ("/dev/null/x", "no folder can be created there (Not a directory)"),
        (f"/tmp/{'x' * 300}/y", "cannot be written to (File name too long)"),
    ],
)
def test_what_no_run_could_write_to_is_refused(path: str, why: str) -> None:
    """Not even the superuser writes to these."""
    with pytest.raises(ConfigError) as caught:
        check_output(Path(path), keep=True)
    assert (caught.value.key, caught.value.value, caught.value.why) == ("output.dir", path, why)
    assert caught.value.hint == "Choose a path that you can write to."


def test_a_folder_below_one_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"output\.dir.*cannot be written to"):
        check_output(Path("runs/new"), keep=True)


@pytest.mark.parametrize(("target", "why"), [("/proc/zz", "no folder can be created"), ("link", "resolved")])
def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path, target: str, why: str) -> None:
    """To nothing that could be made, and to itself."""
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(ConfigError, match=why) as caught:
        check_output(link / "run", keep=True)
    assert caught.value.key == "output.dir"
