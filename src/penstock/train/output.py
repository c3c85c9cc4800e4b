"""The folder of a run: one run at a time writes into it, and no earlier run is ever overwritten."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import TracebackType
from typing import IO

from penstock.config import ConfigError

LOCK = ".lock"


class OutputFolder:
    """`path`, held by a lock (released by the system when the process dies) while it is entered.

    A new run finds the folder empty: what an earlier run left there is moved aside to `path.1`, `path.2`, ...
    A resumed run finds it as it is.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path, self._resume = path, resume
        self.moved_to: Path | None = None
        self._lock: IO[str] | None = None

    def __enter__(self) -> OutputFolder:
        self._acquire()
        if not self._resume and any(entry.name != LOCK for entry in self.path.iterdir()):
            self._release()
            self.moved_to = _free_name(self.path)
            self.path.rename(self.moved_to)
            self._acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _acquire(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("w")
        except OSError as error:
            why = f"cannot be written to: {error.strerror}"
            raise ConfigError("output.dir", str(self.path), why, "Choose a folder that you own.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            hint = "Wait until it has ended, or choose another folder."
            raise ConfigError("output.dir", str(self.path), "another run is writing there", hint) from None

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside
