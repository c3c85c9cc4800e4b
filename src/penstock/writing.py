"""The only place that opens files for writing: never through a link, and never over what others have open.

A folder may come from someone else, with links in it to files of whoever works with it. So a file is made
under a new name, which nothing had before, and gets its final name when it is whole. A link of that name is
replaced, and what it leads to stays as it is; a process that is killed leaves the old file or the new one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, TextIO

PART: Final = ".part"
TOKEN_BYTES: Final = 4
DRAFT: Final = re.compile(rf".+\.[0-9a-f]{{{2 * TOKEN_BYTES}}}{re.escape(PART)}")
"""Names of files that are being written, or that a killed process has left."""

UNFINISHED: Final = ".unfinished-"
"""Beginning of the names of folders that are being written."""

NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
TRIAL_BYTES: Final = 1 << 16
NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Error numbers of file systems that do not know locks."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # from <linux/fcntl.h>, <linux/fs.h>


class Draft:
    """A file for `path` that has another name until `settle`.

    Attributes:
        file: Open for writing and reading, also after it has its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = path.with_name(f"{path.name}.{os.urandom(TOKEN_BYTES).hex()}{PART}")
        self.file: BinaryIO = open(os.open(self._own, NEW, 0o666), "w+b")  # noqa: PTH123, SIM115  # a descriptor

    def settle(self, *, durable: bool = False, yields: bool = False) -> BinaryIO:
        """Give the file its name, in place of what has it; return the file, which stays open.

        Args:
            durable: Whether to wait until the disk has content and name, so that no power cut undoes them.
            yields: Whether what has the name by now keeps it, and this file goes.
        """
        self.file.flush()
        if durable:
            os.fsync(self.file.fileno())
        if yields:
            with suppress(OSError):  # another has the name, or there are no hard links
                self.path.hardlink_to(self._own)
        if yields and self.path.exists():
            self._own.unlink()
        else:
            self._own.replace(self.path)
        if durable:
            make_durable(self.path.parent)
        return self.file

    def discard(self) -> None:
        """Close and remove the file, unless it has its name already."""
        with suppress(OSError):  # what is still to be written is not wanted
            self.file.close()
        self._own.unlink(missing_ok=True)


class LineFile:
    """A file that grows line by line, and that can be made again where its name is gone.

    Args:
        path: The file's path; what had the name is replaced.
        beginning: The file's first lines.
    """

    def __init__(self, path: Path, beginning: Iterable[bytes] = ()) -> None:
        self.path, self._file = path, _begun(path, beginning)

    def add(self, line: bytes) -> None:
        """Add a line, which is in the file when this returns; an error of the system names the file."""
        with naming(self.path):
            self._file.write(line)
            self._file.flush()

    @property
    def is_there(self) -> bool:
        """Whether the path still leads to this file; a system that does not answer is not taken for a no."""
        return leads_to(self.path, self._file)

    def renew(self) -> None:
        """Make the file again under its name, with all lines so far: the open file still has them."""
        former = self._file
        former.seek(0)
        self._file = _begun(self.path, former)
        former.close()

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # what could not be written was an error of `add`
            self._file.close()


def _begun(path: Path, lines: Iterable[bytes]) -> BinaryIO:
    draft = Draft(path)
    try:
        draft.file.writelines(lines)
        file = draft.settle(durable=True)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # else a file that others cut short would get a hole
        return file
    except BaseException:
        draft.discard()
        raise


def leads_to(path: Path, file: IO[Any]) -> bool:
    """Tell whether a path is the name of an open file; True where the system does not say."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in an error of the system, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


@contextmanager
def replacing(path: Path, *, durable: bool = False, yields: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that replaces the one at `path` when the context is left; after an error nothing changes.

    An error of the system names the file.

    Args:
        durable, yields: See `Draft.settle`.
    """
    draft = Draft(path)
    try:
        with naming(path):
            yield draft.file
            draft.settle(durable=durable, yields=yields).close()
    except BaseException:
        draft.discard()
        raise


def write_whole(path: Path, data: str | bytes, *, durable: bool = False, yields: bool = False) -> None:
    """Write a file as a whole or not at all.

    Args:
        data: The content; text is written as UTF-8.
        durable, yields: See `Draft.settle`.
    """
    with replacing(path, durable=durable, yields=yields) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_setting(path: Path, text: str) -> None:
    """Write to a file of the kernel, such as those in /proc, which no other file can replace."""
    with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb") as file:  # noqa: PTH123  # a descriptor
        file.write(text.encode())


def open_lock(path: Path, *, makes: bool = True) -> BinaryIO:
    """Open the file of a lock; what it holds stays as it is.

    Args:
        makes: Whether it is made where it is missing.

    Raises:
        OSError: It cannot be opened, or is a link, a pipe or anything else that is no file; `strerror` is the
            reason.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if makes else 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, f"{path.name} in it is a link") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"{path.name} in it is not a regular file")
    return open(handle, "rb")  # noqa: PTH123  # a descriptor


def take_lock(lock: BinaryIO, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Take a lock and return True; False where another has it, and None where there are no locks.

    That is so on Lustre that is mounted without `flock`, and on NFS without its daemon.
    """
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True


def open_log(path: Path) -> TextIO:
    """Open a file to which lines are added at its end; make it where it is missing. Refuses a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return open(os.open(path, flags, 0o666), "a", encoding="utf-8")  # noqa: PTH123  # a descriptor


def try_to_write(folder: Path, name: str = "penstock") -> None:
    """Write a file into `folder` as if it were to have this name, and leave nothing.

    Raises:
        OSError: The file cannot be written, also on a full disk, where an empty one could still be made.
    """
    draft = Draft(folder / name)
    try:
        draft.file.write(bytes(TRIAL_BYTES))
        draft.file.flush()
        os.fsync(draft.file.fileno())
    finally:
        draft.discard()


def remove_drafts(folder: Path) -> None:
    """Remove files that killed processes were writing. No other process may write there."""
    for path in folder.iterdir():
        if DRAFT.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a file, or a folder with all in it; of a link only the link, and nothing where nothing is."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders in one step; return False where the system cannot do that.

    Linux can, on most local file systems and on few network file systems.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    names = (AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second))
    return bool(renameat2(*names, RENAME_EXCHANGE) == 0)


def make_durable(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk: a power cut may undo what is not.

    Some file systems, such as shares of SMB, have no such wait for folders.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(handle)


def free_name(path: Path) -> Path:
    """Return the path with the first number after its name that is free."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    return aside
