"""The sockets under a transport: Gloo opens them itself and offers no handle, so they are found here."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sockets:
    """Open connections of this process: what each descriptor pointed at when it was found (Linux)."""

    targets: frozenset[tuple[int, str]]

    @staticmethod
    def now() -> Sockets:
        """Return all sockets that are open."""
        return Sockets(frozenset(_open_sockets(Path("/proc/self/fd"))))

    def since(self, before: Sockets) -> Sockets:
        """Return the sockets that were opened after `before` was taken."""
        return Sockets(self.targets - before.targets)

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
        # A descriptor whose socket was closed may stand for something else by now: both must be as they were.
        for descriptor, _ in self.targets & Sockets.now().targets:
            # A connection that a peer has closed already needs nothing more.
            with suppress(OSError), closing(socket.socket(fileno=os.dup(descriptor))) as connection:
                connection.getpeername()  # a listener has no peer; cutting one would abort the process
                act(connection)


def _open_sockets(folder: Path) -> Iterator[tuple[int, str]]:
    for entry in folder.iterdir() if folder.exists() else ():
        with suppress(FileNotFoundError):  # the descriptor that lists the folder is gone by now
            target = str(entry.readlink())
            if target.startswith("socket:"):
                yield int(entry.name), target
