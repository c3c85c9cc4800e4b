"""Starts the ranks of this machine, watches them, and stops all of them when one fails.

The parent holds the store at which the ranks meet, so no rank's death takes it away and no port is chosen
before it is bound. A rank's environment is torchrun's, so a script cannot tell the difference. Ranks run
beside the parent, or where a `Place` puts them, such as an emulated cluster.

When one rank fails the others cannot finish, but they soon notice and can report the failure best themselves.
So they get `grace_s` to do that, then SIGTERM, then SIGKILL. A rank that does not answer the others is killed
as soon as they report it, since it would not heed a SIGTERM either. On Linux a rank also dies when its parent
does, even by `kill -9`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from penstock.stops import SIGNALS
from penstock.topology.faults import cause, named, report_killed, silent_ranks
from penstock.train.signals import recorded_signals, shares_terminal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

POLL_S: Final = 0.02
KILL_AFTER_TERM_S: Final = 5.0
KILL_AFTER_VERDICT_S: Final = 1.5
"""Seconds for ranks that answer, where others do not: enough to report what they waited for."""
LOOPBACK: Final = "127.0.0.1"
PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that ended by itself with a failure; a negative `returncode` is the signal that killed it."""

    rank: int
    returncode: int

    @property
    def signal_name(self) -> str | None:
        """Name of the signal, such as SIGKILL; None if the rank exited."""
        if self.returncode >= 0:
            return None
        known = {each.value: each.name for each in signal.Signals}
        return known.get(-self.returncode, "a real-time signal")

    def describe(self) -> str:
        """Return one line, such as `rank 2 was killed by signal 9 (SIGKILL)`."""
        if self.returncode - 128 in SIGNALS:
            return f"rank {self.rank} was stopped by {signal.Signals(self.returncode - 128).name}"
        if self.signal_name is None:
            return f"rank {self.rank} exited with code {self.returncode}"
        return f"rank {self.rank} was killed by signal {-self.returncode} ({self.signal_name})"


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How every rank ended, in rank order, and why.

    `stopped` are the ranks that the launcher had to signal, so that their exit codes are not their own;
    `interrupted_by` is the first signal that ended the whole run. `silent` maps each rank that did not answer
    the others to whether a signal had stopped it. `cause` is the rank that failed for a reason of its own,
    with the reason, or what others waited for, as the ranks have said.
    """

    exit_codes: tuple[int, ...]
    first_failure: Failure | None
    stopped: frozenset[int]
    interrupted_by: signal.Signals | None
    silent: Mapping[int, bool] = field(default_factory=dict)
    cause: tuple[int | None, str] = (None, "")

    def describe(self) -> str | None:
        """Return the failure to name first, such as `rank 1 did not answer: it was stopped by a signal`.

        The reason follows, with the task in which the rank failed, or in which others waited for it.
        """
        failure, (culprit, why) = self.first_failure, self.cause
        if self.silent:
            ranks, signalled = sorted(self.silent), all(self.silent.values())
            more = ": it was stopped by a signal" if signalled else " and was killed"
            if len(ranks) > 1:
                more = ": a signal had stopped them" if signalled else " and were killed"
            return f"{named(ranks)} did not answer{more}" + (f"; {why}" if why else "")
        if failure is None or not why:
            return None if failure is None else failure.describe()
        if failure.returncode > 0 and culprit is not None:
            failure = Failure(rank=culprit, returncode=self.exit_codes[culprit] or failure.returncode)
            return f"{failure.describe()}: {why}"
        return failure.describe() if culprit == failure.rank else f"{failure.describe()}; {why}"

    @property
    def exit_code(self) -> int:
        """The code with which the launcher should exit.

        0 if all ranks did; 128 + signal if an interruption ended them, as shells expect (130 is Ctrl-C), and
        none failed at that; 2, bad usage, if every rank that failed by itself exited with it; else 1.
        """
        if not any(self.exit_codes):
            return 0
        failed_then = any(code > 0 and code - 128 not in SIGNALS for code in self.exit_codes)
        if self.interrupted_by is not None and self.first_failure is None and not failed_then:
            return 128 + self.interrupted_by
        failed = {code for rank, code in enumerate(self.exit_codes) if code and rank not in self.stopped}
        return 2 if failed == {2} else 1


class Place(Protocol):
    """Where on this machine the ranks run."""

    def address(self, rank: int) -> str:
        """Return the address of a rank, as all the other ranks see it."""

    def listen_address(self, rank: int) -> str:
        """Return where a server of a rank listens, so that all reach it, and the rank itself at 127.0.0.1."""

    def command(self, rank: int, argv: Sequence[str]) -> Sequence[str]:
        """Return the command that runs `argv` at the place of `rank`, in the same process."""

    def environ(self, rank: int) -> Mapping[str, str]:
        """Return what `rank` finds in its environment in addition to, or instead of, what all ranks find."""

    def run_inside(self, rank: int, work: Callable[[], T]) -> T:
        """Return what `work` returns when run at the place of `rank`; servers that it starts stay there."""


def launch(
    command: Sequence[str],
    processes: int,
    *,
    grace_s: float,
    environ: Mapping[str, str] | None = None,
    place: Place | None = None,
    hears: bool = False,
    ended: Callable[[LaunchOutcome], object] | None = None,
) -> LaunchOutcome:
    """Run `command` as ranks 0 to `processes` - 1 on this machine and wait until all have ended.

    The ranks inherit stdout, stderr and `environ` (None: this process's), and run at `place` (None: beside
    this process). `grace_s` is how long ranks may continue after one has failed or the run was interrupted.
    hears: whether the command lets signals through by `penstock.stops`; until then they wait, so that none
    ends Python's own start with a traceback. ended: called when all ranks have ended, while signals still
    interrupt nothing. Raises `ValueError` for fewer than one process and `OSError` if the command cannot be
    started; no rank is left running, whatever happens.
    """
    if processes < 1:
        raise ValueError(f"processes = {processes}: must be at least 1. Start one or more.")
    place = place or _Here()
    store = place.run_inside(0, lambda: _host_store(place.listen_address(0)))
    shared = _shared_environ(os.environ if environ is None else environ, processes, place.address(0), store)
    with recorded_signals() as received:
        ranks = _Ranks(grace_s=grace_s, received=received, store=store)
        try:
            with _held_back(SIGNALS if hears else ()):
                ranks.start(command, processes, shared, place)
            ranks.wait()
        finally:
            ranks.kill()
        outcome = ranks.outcome()
        if ended is not None:
            ended(outcome)
    return outcome


class _Ranks:
    """The running children; their state is checked once every `POLL_S`."""

    def __init__(self, *, grace_s: float, received: list[signal.Signals], store: TCPStore) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.grace_s = grace_s
        self.received = received  # filled by the signal handler, in the order of arrival
        self.store = store  # where ranks say why they end, and who does not answer
        self.silent: dict[int, bool] = {}
        self.heeded = 0  # how many of the received signals have been acted upon
        self.first_failure: Failure | None = None
        self.stopped: set[int] = set()
        self.terminate_at_s = float("inf")
        self.kill_at_s = float("inf")

    def start(self, command: Sequence[str], processes: int, shared: Mapping[str, str], place: Place) -> None:
        with_parent = die_with_parent(os.getpid())
        for rank in range(processes):
            argv = place.command(rank, command)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **place.environ(rank)}
            # Forking beside the store's threads is safe here: all that runs before exec is a system call.
            child = subprocess.Popen(argv, env={**shared, **own}, preexec_fn=with_parent)  # noqa: PLW1509
            self.processes.append(child)

    def wait(self) -> None:
        """Wait until every rank has ended, by itself or because it was stopped."""
        while self.running():
            self.notice_failure()
            self.heed_verdict()
            self.heed_signals()
            self.escalate()
            time.sleep(POLL_S)
        self.notice_failure()

    def running(self) -> list[int]:
        return [rank for rank, child in enumerate(self.processes) if child.poll() is None]

    def heed_signals(self) -> None:
        """Pass on signals that reached only this process. A second interruption cuts the grace short."""
        for number in self.received[self.heeded :]:
            if number != signal.SIGINT or not shares_terminal():
                self.send(number)
            self.stop_within(self.grace_s if self.heeded == 0 else 0.0)
            self.heeded += 1

    def notice_failure(self) -> None:
        """Record the first rank that failed by itself.

        Of ranks that ended within one poll, one that was killed comes first: the others reacted to its end.
        """
        ended = [(rank, child.returncode) for rank, child in enumerate(self.processes) if child.returncode]
        if self.first_failure or self.received or not ended:
            return
        rank, returncode = min(ended, key=lambda each: (each[1] > 0, each[0]))
        self.first_failure = failure = Failure(rank=rank, returncode=returncode)
        if returncode < 0:
            how = failure.describe().partition(" was ")[2]
            report_killed(self.store, rank, len(self.processes), how)
        self.stop_within(self.grace_s)

    def heed_verdict(self) -> None:
        """Kill, once a rank has failed, the ranks that the others call silent, and soon all that are left."""
        if self.first_failure is None or self.silent:
            return
        running = self.running()
        self.silent = {
            rank: _is_stopped(self.processes[rank].pid)
            for rank in silent_ranks(self.store)
            if rank in running
        }
        if not self.silent and running and all(_is_stopped(self.processes[rank].pid) for rank in running):
            self.silent = dict.fromkeys(running, True)  # no rank is left to report it
        for rank in self.silent:
            self.stopped.add(rank)
            self.processes[rank].kill()
        if self.silent:
            self.kill_at_s = min(self.kill_at_s, time.monotonic() + KILL_AFTER_VERDICT_S)

    def escalate(self) -> None:
        """Send SIGTERM when the grace is over, and SIGKILL when that did not help either."""
        now_s = time.monotonic()
        if now_s >= self.terminate_at_s:
            self.send(signal.SIGTERM)
            self.terminate_at_s = float("inf")
            self.kill_at_s = min(self.kill_at_s, now_s + KILL_AFTER_TERM_S)
        if now_s >= self.kill_at_s:
            self.send(signal.SIGKILL)

    def stop_within(self, seconds: float) -> None:
        self.terminate_at_s = min(self.terminate_at_s, time.monotonic() + seconds)

    def send(self, number: signal.Signals) -> None:
        for rank in self.running():
            self.stopped.add(rank)
            self.processes[rank].send_signal(number)

    def kill(self) -> None:
        """Kill every process that is still running; after `wait` none is."""
        self.send(signal.SIGKILL)
        for child in self.processes:
            child.wait()

    def outcome(self) -> LaunchOutcome:
        return LaunchOutcome(
            exit_codes=tuple(child.returncode for child in self.processes),
            first_failure=self.first_failure,
            stopped=frozenset(self.stopped),
            interrupted_by=self.received[0] if self.received else None,
            silent=self.silent,
            cause=cause(self.store),
        )


@contextmanager
def _held_back(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Let these signals wait while entered; a process that is started meanwhile inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- the store and the environment -------------------------------------------------------------------------


class _Here:
    """Ranks beside this process, which meet at the loopback interface."""

    def address(self, rank: int) -> str:
        del rank
        return LOOPBACK

    def listen_address(self, rank: int) -> str:
        return self.address(rank)

    def command(self, rank: int, argv: Sequence[str]) -> Sequence[str]:
        del rank
        return argv

    def environ(self, rank: int) -> Mapping[str, str]:
        del rank
        return {}

    def run_inside(self, rank: int, work: Callable[[], T]) -> T:
        del rank
        return work()


def _host_store(address: str) -> TCPStore:
    """Return the store at which the ranks meet; it serves as long as the object lives.

    It is given a socket that is already bound, as it would otherwise listen on every interface. This process
    reaches it at the loopback address, which has a name on every machine: torch warns of addresses that have
    none.
    """
    # torch.distributed exports it as well, but hides it from type checkers.
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((address, 0), backlog=1024)
    port: int = listener.getsockname()[1]
    # detach: the store closes the socket when it goes.
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _is_stopped(pid: int) -> bool:
    """Tell whether a signal or a debugger has stopped the process; False where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _shared_environ(
    environ: Mapping[str, str], processes: int, address: str, store: TCPStore
) -> dict[str, str]:
    """Return the environment that all ranks find."""
    ours = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 connects to this store instead of hosting its own
        "PENSTOCK_LAUNCHED": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {"OMP_NUM_THREADS": "1", **environ, **ours}


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return a function by which a child, before its command, asks the kernel to kill it when `parent` dies.

    Linux only (None elsewhere, where `kill -9` of the parent leaves the ranks to notice by themselves). The
    kernel goes by the thread that started the child, and that thread waits for the child in `launch`. The
    library is loaded here, since between fork and exec a child should do as little as it can.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_for_signal() -> None:
        if prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses PR_SET_PDEATHSIG")
        if os.getppid() != parent:  # the parent died before the kernel was asked
            os._exit(1)

    return ask_for_signal
