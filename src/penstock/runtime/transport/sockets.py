"""The sockets under a transport: Gloo opens them itself and offers no handle, so they are found here."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/proc/self")
Target = tuple[int, str]
"""A descriptor, and what it points at."""


@dataclass(frozen=True)
class Sockets:
    """Open connections of this process: what each descriptor pointed at when it was found (Linux)."""

    targets: frozenset[Target]

    @staticmethod
    def now() -> Sockets:
        """Return all sockets that are open."""
        return Sockets(frozenset(each for each in _descriptors() if each[1].startswith("socket:")))

    def since(self, before: Sockets) -> Sockets:
        """Return the sockets that were opened after `before` was taken, by any thread."""
        return Sockets(self.targets - before.targets)

    def of_gloo(self) -> Sockets:
        """Return those in which Gloo waits; all of them where the system does not say (gVisor).

        A thread of Gloo waits for its connections in a set of events (epoll). Of the sets of a process these
        are the ones that a program which it starts would inherit: Python, libuv and the like forbid that.
        """
        watched = {found for number, to in _descriptors() if "eventpoll" in to for found in _watched(number)}
        return Sockets(frozenset(each for each in self.targets if each[0] in watched)) if watched else self

    def limit_send_buffers(self, size_bytes: int) -> None:
        """Let no more than about `size_bytes` wait in each connection; 0 leaves it to the system.

        The system lets megabytes wait. Gloo announces every receive to the sender on the same connection:
        behind megabytes of data the announcement comes milliseconds late, and the link idles for as long.
        """
        if size_bytes > 0:
            self._each(lambda s: s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes))

    def cut(self) -> None:
        """End both directions of every connection: threads that wait for it wake, here and at the peer."""
        self._each(lambda connection: connection.shutdown(socket.SHUT_RDWR))

    def _each(self, act: Callable[[socket.socket], None]) -> None:
        for descriptor, target in self.targets:
            # A connection that was closed, here or by a peer, needs nothing more.
            with suppress(OSError), _copy_of(descriptor, target) as connection:
                connection.getpeername()  # a listener has no peer; cutting one would abort the process
                act(connection)


def _copy_of(descriptor: int, target: str) -> socket.socket:
    """Return another handle of a socket. Raises OSError if the descriptor now stands for something else."""
    copy = os.dup(descriptor)
    if str((FOLDER / "fd" / str(copy)).readlink()) == target:
        return socket.socket(fileno=copy)
    os.close(copy)
    raise OSError(errno.EBADF, f"descriptor {descriptor} is no longer {target}")


def _descriptors() -> Iterator[Target]:
    folder = FOLDER / "fd"
    for entry in folder.iterdir() if folder.exists() else ():
        with suppress(FileNotFoundError):  # the descriptor that lists the folder is gone by now
            yield int(entry.name), str(entry.readlink())


def _watched(poll: int) -> list[int]:
    """Return the descriptors in a set of events that other programs would inherit; [] for any other set."""
    with suppress(OSError):  # it was closed meanwhile
        text = (FOLDER / "fdinfo" / str(poll)).read_text(encoding="utf-8")
        flags = re.search(r"^flags:\s*([0-7]+)", text, re.MULTILINE)
        if flags is not None and not int(flags[1], 8) & os.O_CLOEXEC:
            return [int(number) for number in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]
    return []
