"""Files of a checkpoint, read without trust: a name may hide a link, a pipe, a folder or excessive data."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

DAMAGE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ENXIO})
"""Error numbers of files that are missing, permanently unreadable, or no files. Others, such as that of a
missing permission, say nothing about the checkpoint."""


class DamagedError(ValueError):
    """A checkpoint is not as it was written: which file, and what is wrong with it."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; raise DamagedError unless it is a regular file. Links are not followed."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in DAMAGE:
            raise DamagedError(f"{path.name} cannot be opened: {error.strerror}") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedError(f"{path.name} is not a regular file")
    return open(handle, "rb")  # noqa: PTH123  # a descriptor, not a path


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file of at most `most_bytes`; raise DamagedError for a longer file."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise DamagedError(f"{path.name} has more than {most_bytes:,} bytes")
    return data


def read_table(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file; raise DamagedError for anything else, however deeply nested."""
    try:
        table = json.loads(read_regular(path, most_bytes))
    except DamagedError:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path.name} is not JSON that can be read: {error}") from error
    if not isinstance(table, dict):
        raise DamagedError(f"{path.name} holds no JSON object")
    return table


def to_json(table: Mapping[str, Any]) -> str:
    """Return readable JSON; raise ValueError for numbers that JSON cannot express."""
    return json.dumps(table, indent=1, allow_nan=False) + "\n"
