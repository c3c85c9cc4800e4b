"""Sockets that Gloo opens itself without a handle, and its threads that wait for them; Linux only."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


def native_threads() -> set[int]:
    """Return the threads that Python did not start, by their numbers in the system; Linux only.

    Those in which Gloo waits for sockets are among them. Each names itself, which one that has just been
    started may not have done yet.
    """
    folder = Path("/proc/self/task")
    threads = {int(thread.name) for thread in folder.iterdir()} if folder.exists() else set[int]()
    return threads - {thread.native_id for thread in threading.enumerate()}


def wait_their_turn(threads: Collection[int]) -> None:
    """Let threads preempt no other when they wake; a free core they still take at once.

    Gloo starts its threads itself. One that finds its connection locked asks again and again until it is
    free. The lock belongs to the thread that sends. Where there are no more cores than threads, a thread that
    wakes takes the sender's core and asks for the rest of its time slice: 1 to 3 ms, in which the sender
    could have released the lock at once.
    """
    for thread in threads:
        # A closed group has ended its thread; where a sandbox forbids the call, only time is lost.
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


# ---- sockets -----------------------------------------------------------------------------------------------


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
        watched = set[int]()
        for number, target in _descriptors():
            if "eventpoll" not in target:
                continue
            with suppress(OSError):  # it was closed meanwhile
                text = (FOLDER / "fdinfo" / str(number)).read_text(encoding="utf-8")
                flags = re.search(r"^flags:\s*([0-7]+)", text, re.MULTILINE)
                if flags is not None and not int(flags[1], 8) & os.O_CLOEXEC:
                    watched.update(map(int, re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)))
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
            with suppress(OSError):
                copy = os.dup(descriptor)
                if str((FOLDER / "fd" / str(copy)).readlink()) != target:  # it stands for something else now
                    os.close(copy)
                    continue
                with socket.socket(fileno=copy) as connection:
                    connection.getpeername()  # a listener has no peer; cutting one would abort the process
                    act(connection)


def _descriptors() -> Iterator[Target]:
    folder = FOLDER / "fd"
    for entry in folder.iterdir() if folder.exists() else ():
        with suppress(FileNotFoundError):  # the descriptor that lists the folder is gone by now
            yield int(entry.name), str(entry.readlink())
