"""Reads any number of files in place, of which a few are open at a time.

Content is read with `pread`, so the system's page cache holds it once for all ranks, and none of it counts as
a process's own memory. A file that changes while a run reads it causes an error with its name; if it were
mapped into memory and cut short, the process would be killed with SIGBUS.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.config import ConfigError, open_regular

MOST_OPEN: Final = 64
"""Largest number of files that are open at the same time; a system allows some hundreds."""

HINT: Final = "Give a path that can be read, or none to train on Python's standard library."


class TextError(RuntimeError):
    """A file that existed when the run began cannot be read any more, or has changed."""


class Files:
    """Some files, by number.

    Raises `ConfigError` about `path` for anything that is not a regular file or cannot be read, and
    `TextError` when a file has changed since. Takes some hundred bytes of memory per file.

    path: the setting that named the files, for messages.
    """

    def __init__(self, path: str | None, files: Sequence[Path]) -> None:
        self.path, self.files = path, tuple(files)
        self._open: OrderedDict[int, int] = OrderedDict()
        self._states = [_state(self._descriptor(number)) for number in range(len(self.files))]

    @property
    def sizes_bytes(self) -> list[int]:
        """Sizes of all files."""
        return [size for size, _ in self._states]

    def read(self, number: int, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of a file."""
        found, file = [], self.files[number]
        try:
            descriptor = self._descriptor(number)
            while start < stop and _state(descriptor) == self._states[number]:
                found.append(os.pread(descriptor, stop - start, start))
                start += len(found[-1])
        except (OSError, ConfigError) as error:
            raise TextError(f"cannot read {file} any more: {error}") from error
        if start < stop:
            raise TextError(f"{file} has changed since the run began; leave it alone while a run reads it")
        return b"".join(found)

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def _descriptor(self, number: int) -> int:
        """Return the descriptor of a file, opening it if necessary instead of the least recently used one."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        try:
            with open_regular(self.files[number], "path", HINT, self.path) as opened:
                self._open[number] = os.dup(opened.fileno())
        except ConfigError as error:
            raise ConfigError("path", self.path, f"{self.files[number]} {error.why}", HINT) from error
        return self._open[number]


def _state(descriptor: int) -> tuple[int, int]:
    """Return what changes when a file is written to: its size and the time of the last change."""
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns
