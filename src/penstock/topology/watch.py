"""Ends the waits of a rank on a GPU when another rank has failed, was killed, or does not come.

On CPUs a rank that fails cuts its connections, which wakes its peers, and tells them (`rollcall.HEARERS`).
Nothing wakes a kernel of NCCL: it waits on the device, and the host behind it in a copy or an event. So a
thread of every rank watches the others by way of the hosts. It ends this rank's exchanges when it hears from
a rank that has given up (`rollcall`), when the connection to the next rank breaks, as that rank was killed,
or when an exchange lasts longer than the timeout. What waited goes on with any numbers, and whoever reads
them asks `ACTIVITY.check` first.
"""

from __future__ import annotations

import atexit
import select
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from penstock.topology.rollcall import ACTIVITY, BYE, RollCall

POLL_S: Final = 0.1
"""How often a rank looks after the others."""

END_EXCHANGES: Final[list[Callable[[], None]]] = []
"""What ends all exchanges that this process has begun on devices."""


class Watch:
    """Watches the other ranks of a roll call, until it is stopped.

    timeout_s: how long an exchange of a step may last. fail: tells the other ranks why this one ends, if
    Python ends by an error.
    """

    def __init__(self, roll_call: RollCall, timeout_s: float, fail: Callable[[BaseException], None]) -> None:
        self._roll_call, self._timeout_s, self._fail = roll_call, timeout_s, fail
        self._stopped = threading.Event()
        self._neighbour: socket.socket | None = None
        with suppress(OSError):  # it has ended meanwhile, and says why to all
            self._neighbour = roll_call.connect_to_neighbour()
        ACTIVITY.lost = None
        self._thread = threading.Thread(target=self._run, name="penstock-watch", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._neighbour is not None:
            self._neighbour.close()
        atexit.unregister(self._at_exit)

    def _run(self) -> None:
        while not self._stopped.is_set():
            told = self._roll_call.told
            if told is not None:
                self._lose(told)
                return
            why = self._neighbour_is_gone() or self._overdue()
            if why:
                # Its own thread: a rank that is stopped does not answer, and this one must not wait longer.
                threading.Thread(target=self._roll_call.give_up, name="penstock-tell", daemon=True).start()
                self._lose(why)
                return

    def _neighbour_is_gone(self) -> str:
        """Wait a moment for a sign of the next rank; return why it is gone, "" if it is not."""
        if self._neighbour is None:
            self._stopped.wait(POLL_S)
            return ""
        if not select.select([self._neighbour], [], [], POLL_S)[0]:
            return ""
        said = b""
        with suppress(OSError):  # reset, or no sign for as long as `KEEPALIVE` says
            said = self._neighbour.recv(len(BYE))
        self._neighbour.close()
        self._neighbour = None
        return "" if said == BYE else "the connection to the next rank has broken"

    def _overdue(self) -> str:
        waited_s = ACTIVITY.waited_s
        return f"an exchange has lasted for {waited_s:.1f} s" if waited_s > self._timeout_s else ""

    def _lose(self, why: str) -> None:
        """End this rank's exchanges. Whoever is freed by that must find the reason."""
        ACTIVITY.lost = why
        for end in END_EXCHANGES:
            end()

    def _at_exit(self) -> None:
        """Take leave of the others when Python ends without having left them, or tell them the error."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._fail(error)
        else:
            self.stop()
            self._roll_call.close()
