"""What becomes of a process that is asked to stop (see `SIGNALS`), from its first moment to its last.

While modules are loaded there is nothing to clear up, and an exception could be lost inside an import, so the
process ends at once. While a command works, KeyboardInterrupt is raised, once. When the work is done, a stop
interrupts nothing. In all of them one line says what the stop leaves, on one of several ranks.

Python's own handlers run late, or never, in a process that waits inside a library. The kernel's word reaches
a thread whatever the main one does: it ends a process that stands still for `GRACE_S` after a stop, and one
that is asked again. A part that handles signals itself, for a while, is left alone by all of this.

It is the first that a command loads, so it does without `typing`, which takes longer to load than the rest.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Requests to stop: of people, systems, terminals that go, and batch systems before the time is over."""

NOT_YET = "stopped before the command began; nothing was done"
STOPPED = "stopped"
SAME_REQUEST_S = 2.0
"""Signals fewer seconds after the first than this belong to the same request to stop."""

GRACE_S = 4.0
"""Seconds for which a process may stand still after it was asked to stop."""

SAY_S = 1.0
"""Seconds for the last line, whose reader may be gone."""

POLL_S = 0.05
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


class Phase(Enum):
    """What a stop finds."""

    LOADING, WORKING, DONE = range(3)


class Stops:
    """Requests to stop this process, and what is true to say about one."""

    def __init__(self) -> None:
        self._taken: list[signal.Signals] = []
        self.begin(NOT_YET)
        self._phase = Phase.LOADING

    # ---- what a command notes ----

    def hear(self) -> None:
        """Take the signals, unless they are ignored, and let through what was held back until now.

        A rank that Penstock has started dies with the process that did.
        """
        if ask := die_with_parent(int(os.environ.get("PENSTOCK_LAUNCHED") or 0)):
            ask()
        self._taken = heeded()
        for number in self._taken:
            signal.signal(number, self._handle)
        ears, mouth = os.pipe()
        os.set_blocking(mouth, False)
        signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(ears,), name="penstock-stops", daemon=True).start()
        atexit.register(self._rest)  # the first that is registered is called last
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    @property
    def hears(self) -> bool:
        """Whether some signal is taken: another part of the process may have handlers of its own."""
        return any(map(self._is_ours, SIGNALS))

    def begin(self, left: str) -> None:
        """Note that a command begins, after which a stop leaves what `left` says; "" = it says so itself."""
        self.heard: int | None = None
        self._raised, self._told = False, threading.Lock()
        self._code: int | None = None
        self._left, self._phase = lambda: left, Phase.WORKING

    def says(self, left: Callable[[], str]) -> None:
        """Ask `left` from now on what a stop leaves: a clause that begins with "stopped"."""
        self._left = left

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let a stop end the process at once while entered, for imports of what takes long to load."""
        before, self._phase = self._phase, Phase.LOADING
        try:
            yield
        finally:
            self._phase = before

    def finish(self, code: int | None, left: str = "") -> None:
        """Note that the work is done: a stop raises nothing more.

        Args:
            code: Exit code with which a process that then stands still is ended; None = that of a stop.
            left: What a stop leaves, as it then says; "" = it says nothing.
        """
        self._phase = Phase.DONE
        self._left, self._code = lambda: left, code

    def stopped(self) -> int:
        """Say what this stop leaves, and return the exit code."""
        self._phase, self._code = Phase.DONE, None
        self.say()
        return self.code

    def say(self) -> None:
        """Print what a stop leaves, once, if this process speaks for all ranks."""
        if line := self._line():
            with suppress(OSError):  # nobody is there to read it
                print(line, end="", file=sys.stderr, flush=True)

    @property
    def code(self) -> int:
        """The exit code of a stop, as shells count it: 128 and the number of the signal."""
        return 128 + (self.heard or signal.SIGINT)

    # ---- the signals ----

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        leave_lost_terminal()
        self.heard = self.heard or number
        if self._phase is Phase.LOADING:
            self._leave()
        if self._phase is Phase.WORKING and not self._raised:
            self._raised = True
            raise KeyboardInterrupt

    def _rest(self) -> None:
        """Ignore signals while Python takes itself down: they would kill a process whose code is known."""
        for number in filter(self._is_ours, SIGNALS):
            signal.signal(number, signal.SIG_IGN)

    def _is_ours(self, number: int) -> bool:
        return signal.getsignal(number) == self._handle

    def _watch(self, ears: int) -> None:
        """Hear the kernel's word whatever the main thread waits for."""
        while heard := os.read(ears, 1):
            if heard[0] in SIGNALS and self._is_ours(heard[0]):
                self.heard = self.heard or heard[0]
                self._wait(ears)
                self._leave()

    def _wait(self, ears: int) -> None:
        """Return when the process stands still, or is asked again."""
        patience, insists_s = Patience(threading.main_thread()), time.monotonic() + SAME_REQUEST_S
        while not patience.ends(GRACE_S, moves=self._phase is Phase.DONE):
            if not all(map(self._is_ours, self._taken)):
                patience = Patience(threading.main_thread())
            if select.select([ears], [], [], POLL_S)[0]:
                number = os.read(ears, 1)[0]
                if time.monotonic() > insists_s and number in SIGNALS and self._is_ours(number):
                    return

    def _leave(self) -> None:
        """Say what the stop leaves, and end the process; past sys.stderr, whose lock may be held."""
        start_new_thread(self._end, (SAY_S,))  # whoever hinders the words, and whoever was to read them
        try:
            os.write(2, self._line().encode())
        finally:
            self._end()

    def _end(self, after_s: float = 0.0) -> None:
        time.sleep(after_s)
        os._exit(self.code if self._code is None else self._code)

    def _line(self) -> str:
        text = self._left() if speaks() and self._told.acquire(blocking=False) else ""
        return f"penstock: {text}\n" if text else ""


class Patience:
    """How long another thread may stand still, by its processor time where a system tells that."""

    def __init__(self, thread: threading.Thread) -> None:
        assert thread.ident is not None, "it has been started"
        self._clock = time.pthread_getcpuclockid(thread.ident) if sys.platform == "linux" else None
        self._since_s, self._used_s = time.monotonic(), 0.0

    def ends(self, grace_s: float, *, moves: bool) -> bool:
        """Tell whether it has lasted `grace_s`; if the thread `moves`, only while it used no processor."""
        before_s, now_s = self._used_s, time.monotonic()
        self._used_s = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        if moves and self._used_s != before_s:
            self._since_s = now_s
        return now_s - self._since_s >= grace_s


def heeded() -> list[signal.Signals]:
    """Return the signals that this process is to heed: all but those that it ignores, as under nohup."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def leave_lost_terminal() -> None:
    """Mute a terminal that is gone: a line would be an error, which would end the work still to be saved."""
    for descriptor in (1, 2):
        try:
            os.get_terminal_size(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:
                mute(descriptor)


def replace_closed() -> None:
    """Put the null device in the place of standard files that are closed.

    Otherwise a file that is opened gets the number of one, and what is printed is written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def mute(descriptor: int) -> None:
    """Write to nowhere what would be written to an open file."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return a function by which a child of process `parent` asks the kernel to kill it when that dies.

    Linux only (None elsewhere, where `kill -9` of the parent leaves its children to notice by themselves),
    and None for a process with another parent. The kernel goes by the thread that started the child. The
    library is loaded here, as between fork and exec a child should do as little as it can.
    """
    if sys.platform != "linux" or parent not in (os.getppid(), os.getpid()):
        return None
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        if prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses PR_SET_PDEATHSIG")
        if os.getppid() != parent:  # the parent died before the kernel was asked
            os._exit(1)

    return ask


def speaks() -> bool:
    """Tell whether this process speaks for all ranks, by what its launcher has left."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return next(filter(None, map(os.environ.get, names)), "0") == "0"


STOPS = Stops()
