"""The threads in which Gloo waits for its sockets: it starts them itself, so they are found here (Linux).

Such a thread that finds its connection locked asks again and again until it is free. The lock belongs to the
thread that sends. Where there are no more cores than threads, a thread that wakes takes the sender's core and
asks for the rest of its time slice: 1 to 3 ms, in which the sender could have released the lock at once.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NAME: Final = "gloo_tcp_loop"
"""The name that Gloo gives these threads."""


@dataclass(frozen=True)
class Loops:
    """Threads of this process, by their numbers in the system; none where it is not Linux."""

    threads: frozenset[int]

    @staticmethod
    def now() -> Loops:
        """Return all such threads that run."""
        folder = Path("/proc/self/task")
        found = folder.iterdir() if folder.exists() else ()
        return Loops(frozenset(int(entry.name) for entry in found if _is_loop(entry)))

    def since(self, before: Loops) -> Loops:
        """Return the threads that were started after `before` was taken."""
        return Loops(self.threads - before.threads)

    def wait_their_turn(self) -> None:
        """Let these threads preempt no other when they wake; a free core they still take at once."""
        for thread in self.threads:
            # A closed group has ended its thread; where a sandbox forbids the call, only time is lost.
            with suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _is_loop(thread: Path) -> bool:
    with suppress(OSError):  # the thread has ended: it can no longer be read
        return (thread / "comm").read_text(encoding="utf-8").strip() == NAME
    return False
