"""The folder of a run: one run at a time writes into it, and no earlier run is ever overwritten.

What would be refused when a run begins to write is refused before anything is measured, too, by
`check_output`, which changes nothing and keeps no other run out.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Protocol

from penstock.config import ConfigError, asked, is_missing, read_text
from penstock.config.files import MOST_TOML_BYTES
from penstock.writing import (
    free_name,
    leads_to,
    open_lock,
    remove_drafts,
    take_lock,
    try_to_write,
    write_whole,
)

logger = logging.getLogger(__name__)

LOCK = ".lock"
MARKS = ("metrics.jsonl", "checkpoints", "trace.json")
"""Names that a run leaves. A folder with none of these holds something else and is left as it is."""

CLUSTER_FILE, PLAN_FILE = "cluster.json", "plan.json"
"""The cluster that a run's plans are made for, and the plan in use: in its folder and in every checkpoint."""

FOLDERS = ("checkpoints", "logs", "tensorboard", "wandb")
"""Folders in the folder of a run into which the run writes."""

CONFIG = "config.toml"
"""A run leaves this file, too, but a project may also have one; a run's stands beside a lock."""

CHOOSE = "Choose a path that you can write to."
TRY_AGAIN_S = 0.01


def check_output(path: Path, *, keep: bool) -> None:
    """Raise ConfigError if a run could not write to the folder `path` now, or make it; leave nothing behind.

    Args:
        keep: Whether the run continues the one in the folder.
    """
    there = path
    try:
        there = path = path.resolve()
        while not there.exists() and there != there.parent:
            there = there.parent
        if there == path:
            try_to_write(path)
        else:
            with TemporaryDirectory(dir=there, prefix=".penstock-") as folder:
                try_to_write(Path(folder))
    except RuntimeError as error:  # what links that lead to each other end in
        raise ConfigError("output.dir", str(path), f"cannot be resolved ({error})", CHOOSE) from None
    except OSError as error:
        what = "cannot be written to" if there == path else "no folder can be created there"
        why = f"{what} ({error.strerror})"
        raise ConfigError("output.dir", str(path), why, CHOOSE) from None
    OutputFolder(path, keep=keep).check()


class OutputError(RuntimeError):
    """What a run must keep could not be written."""


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raise OutputError for an error of the system, such as that of a full disk.

    Args:
        path: What it is about where the error names no file.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"{error.filename or path} cannot be written: {error.strerror or error}") from error


class Record(Protocol):
    """A file or folder in a run's folder that the run goes on writing."""

    @property
    def is_there(self) -> bool: ...

    def renew(self) -> None:
        """Make it again in its place."""


class OutputFolder:
    """The folder `path`, held by a lock (released by the system when the process dies) while it is entered.

    A new run finds no other run in it: what an earlier run left is moved aside, as a whole, to `path.1`,
    `path.2`, ... A run that continues finds the folder as it is.

    Args:
        keep: Whether the run continues the one in the folder.

    Attributes:
        records: Files and folders that the run goes on writing in it.
    """

    def __init__(self, path: Path, *, keep: bool) -> None:
        self.path, self._keep = path.resolve(), keep
        self.records: list[Record] = []
        self.moved_to: Path | None = None
        self._lock: BinaryIO | None = None

    def check(self) -> None:
        """Raise ConfigError for what entering it now would refuse; another run may still come first."""
        self._check_project()
        try:
            with open_lock(self.path / LOCK, makes=False) as lock:
                if not _is_shared(lock):
                    raise self._held()
        except FileNotFoundError:
            pass  # without a lock file no run holds it
        except OSError as error:
            raise self._unwritable(error) from None
        if self._has_earlier():
            self._check_movable()
        else:
            self._check_links()

    def __enter__(self) -> OutputFolder:
        self._check_project()
        self._lock = self._acquired()
        if self._has_earlier():
            with self._lock:  # the lock moves with the folder, so no other run can take it before the move
                self._check_movable()
                self.moved_to = free_name(self.path)
                try:
                    self.path.rename(self.moved_to)
                except OSError as error:
                    raise self._stuck(error) from None
                self._lock = self._acquired()
        try:
            self._check_links()
        except ConfigError:
            self._lock.close()
            raise
        with suppress(OSError):  # what stays costs room and does no other harm
            remove_drafts(self.path)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def is_lost(self) -> bool:
        """Whether the folder, its lock or a record was removed or moved away while it is entered."""
        if self._lock is None:
            return False
        return not (leads_to(self.path / LOCK, self._lock) and all(each.is_there for each in self.records))

    def renew(self) -> None:
        """Make again what is lost, with all that was recorded; an earlier run there is moved aside.

        Raises:
            ConfigError: If another run has taken the folder.
        """
        assert self._lock is not None, "it is entered"
        if not leads_to(self.path / LOCK, self._lock):
            self._lock.close()
            self._keep = any(each.is_there for each in self.records)  # then the folder itself is this run's
            self.__enter__()
        for record in self.records:
            if not record.is_there:
                record.renew()

    def _holds(self, name: str) -> bool:
        return asked((self.path / name).exists)

    def _check_project(self) -> None:
        if not self._keep and self._holds(CONFIG) and not any(map(self._holds, (LOCK, *MARKS))):
            why = f"contains a {CONFIG} that was not written by a run, and a run would overwrite it"
            raise self._refused(why, "Choose a folder that contains only runs, such as a subfolder.")

    def _check_links(self) -> None:
        """Raise ConfigError for a link, or anything else, in the place of one of the run's folders."""
        for name in FOLDERS:
            if asked((self.path / name).is_symlink):
                why = f"{name} in it is a link, and a run writes inside its own folder alone"
                raise self._refused(why, "Remove the link, or choose a folder where there is room for all.")
            if self._holds(name) and not asked((self.path / name).is_dir):
                raise self._refused(
                    f"{name} in it is not a folder", "Move it away, or choose another folder."
                )

    def _has_earlier(self) -> bool:
        """Return whether there is an earlier run to move aside."""
        return not self._keep and any(map(self._holds, (CONFIG, *MARKS)))

    def _check_movable(self) -> None:
        """Raise ConfigError where the folder cannot get another name, as far as that shows before."""
        if Path.cwd().is_relative_to(self.path):
            hint = "Choose a subfolder, or change to another directory."
            raise self._refused("contains an earlier run and your current working directory", hint)
        try:
            if self.path.is_mount():
                raise OSError(errno.EBUSY, "a file system is mounted there")
            with TemporaryDirectory(dir=self.path.parent, prefix=".penstock-"):
                pass
        except OSError as error:
            raise self._stuck(error) from None

    def _stuck(self, error: OSError) -> ConfigError:
        why = f"holds an earlier run that cannot be moved aside: {error.strerror}"
        return self._refused(why, "Choose another folder, or continue it with train.resume=true.")

    def _acquired(self) -> BinaryIO:
        """Return the lock of the folder that has this name now: another start may move one aside."""
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = open_lock(self.path / LOCK)
            except OSError as error:
                raise self._unwritable(error) from None
            if _is_taken(lock, fcntl.LOCK_EX):
                if leads_to(self.path / LOCK, lock):
                    return lock
            elif _is_shared(lock):
                time.sleep(TRY_AGAIN_S)  # only another start's trial, which is over in a moment
            else:
                lock.close()
                raise self._held()
            lock.close()

    def _held(self) -> ConfigError:
        hint = "Wait until it has ended, or choose another folder."
        return self._refused("another run is writing there", hint)

    def _unwritable(self, error: OSError) -> ConfigError:
        return self._refused(f"cannot be written to: {error.strerror}", CHOOSE)

    def _refused(self, why: str, hint: str) -> ConfigError:
        return ConfigError("output.dir", str(self.path), why, hint)


def _is_shared(lock: BinaryIO) -> bool:
    """Tell whether no run holds the lock, which is tried in common with others that try it."""
    return _is_taken(lock, fcntl.LOCK_SH) and _is_taken(lock, fcntl.LOCK_UN)


def _is_taken(lock: BinaryIO, kind: int) -> bool:
    """Take the lock unless another has it; tell whether that went well.

    Where there are no locks a run goes on, with a warning.
    """
    taken = take_lock(lock, kind)
    if taken is None and kind == fcntl.LOCK_EX:
        logger.warning("nothing keeps another run out of output.dir: its file system has no locks")
    return taken is not False


def keep_config(folder: Path, text: str, done: int) -> None:
    """Write `config.toml`; keep the previous one, of the first `done` steps, if its settings differ."""
    earlier = config_of(folder)
    if earlier is not None and _settings(earlier) != _settings(text):
        kept = folder / f"config-until-step-{done:08d}.toml"
        write_whole(free_name(kept) if os.path.lexists(kept) else kept, earlier)
    write_whole(folder / CONFIG, text)


def config_of(folder: Path) -> str | None:
    """Return the text of `config.toml`; None where there is none.

    Raises:
        ConfigError: It cannot be read.
    """
    path = folder / CONFIG
    return None if is_missing(path) else read_text(path, str(path), "Move it away.", MOST_TOML_BYTES)


def _settings(text: str) -> list[str]:
    """Return the lines of a configuration without comments, such as those on what was chosen."""
    return [line for line in text.splitlines() if not line.startswith("#")]
