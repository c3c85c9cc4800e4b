"""How a benchmark stops when it is asked to: soon, with what it has measured, and without a traceback.

A signal raises KeyboardInterrupt where Python runs. A process that waits in a library hears it later, and one
that clears up may wait for others that are gone, so a process that has not ended within `GRACE_S` of the
signal is ended. What was measured is printed first, for as long as that goes on: it is given up when it has
stood still for `GRACE_S`, or when there is another signal.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

from benchmarks.progress import PROGRESS
from penstock.cli.ranks import NOTHING_MEASURED
from penstock.cli.run import INTERRUPTED
from penstock.stops import POLL_S, SAME_REQUEST_S, SIGNALS, Patience

UNTIL_THEN: Final = "stopped; the table has what was measured until then"
GRACE_S: Final = 4.0


class Stop:
    """While it is entered: whether this process was `asked` to stop, and that it does.

    Attributes:
        show: Prints a result.
        speaks: Whether this process is the one that says what became of it.
    """

    def __init__(self, show: Callable[[Any], int], *, speaks: bool) -> None:
        self.asked = False
        self._show, self._speaks = show, speaks
        self._raised, self._ended = False, threading.Event()
        self._told, self._telling = False, threading.Lock()

    def __enter__(self) -> Stop:
        self._heard, self._signals = socket.socketpair()
        self._signals.setblocking(False)
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        for number, before in self._before.items():
            if before != signal.SIG_IGN:
                signal.signal(number, self._raise)
        threading.Thread(target=self._watch, name="benchmark-stop", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(-1)
        self._signals.close()

    def tell(self) -> None:
        """Print what was measured, and say so; once, and it is printed when this returns in any thread."""
        with self._telling:
            if self._speaks and not self._told:
                self._print()
            self._told = True

    def finish(self, result: Any) -> int:
        """Print a whole result; a stop from now on has nothing more to tell."""
        with self._telling:
            self._told = True
            return self._show(result)

    def end(self) -> NoReturn:
        """Raise KeyboardInterrupt. A signal that Python has not heard yet raises none after this one."""
        self._raised = True
        raise KeyboardInterrupt

    def _print(self) -> None:
        result = PROGRESS.kept()
        if result is not None:
            self._show(result)
        sys.stdout.flush()
        said = NOTHING_MEASURED if result is None else UNTIL_THEN
        print(f"penstock: {said}", file=sys.stderr, flush=True)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt once: a Ctrl-C may arrive twice, and the second would interrupt the end."""
        del number, frame
        self.asked = True
        if not self._raised:
            self.end()

    def _watch(self) -> None:
        """Hear the kernel's word, which reaches this thread whatever the main one waits for."""
        with self._heard:
            while heard := self._heard.recv(1):
                if heard[0] in SIGNALS:
                    self.asked = True
                    self._see_it_end()

    def _see_it_end(self) -> None:
        """Return when the benchmark has ended; end the process if it stands still or is asked again."""
        insists_s, patience = time.monotonic() + SAME_REQUEST_S, Patience(threading.main_thread())
        while not self._ended.wait(POLL_S):
            repeated = bool(select.select([self._heard], [], [], 0)[0]) and self._heard.recv(1)
            if repeated and time.monotonic() > insists_s:
                os._exit(INTERRUPTED)
            telling = self._telling.locked()
            if not patience.ends(GRACE_S, moves=telling):
                continue
            if telling:
                os._exit(INTERRUPTED)
            patience = Patience(self._teller())

    def _teller(self) -> threading.Thread:
        """Start to tell beside the main thread, which is stuck."""
        thread = threading.Thread(target=self._tell_and_end, name="benchmark-tell", daemon=True)
        thread.start()
        return thread

    def _tell_and_end(self) -> None:
        self.tell()
        os._exit(INTERRUPTED)
