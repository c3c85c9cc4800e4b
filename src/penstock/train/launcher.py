"""Starts the ranks of this machine, watches them, and takes all of them down when one fails.

The parent holds the store at which the ranks meet, so no rank's death takes it away and no port is chosen
before it is bound. A rank's environment is torchrun's, so a script cannot tell the difference. Ranks run
beside us, or where a `Place` puts them, such as an emulated cluster.

When one rank fails the others cannot finish, but they soon notice and say so better than anyone else could.
So they get `grace_s` to do that, then SIGTERM, then SIGKILL. A rank that does not answer the others is killed
as soon as they say so, since it would not heed a SIGTERM either. On Linux a rank also dies when its parent
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from penstock.topology.blame import CULPRITS_KEY
from penstock.topology.rollcall import named
from penstock.train.signals import recorded_signals, shares_terminal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

POLL_S: Final = 0.02
KILL_AFTER_TERM_S: Final = 5.0
KILL_AFTER_VERDICT_S: Final = 1.5
"""For ranks that answer, where others do not: enough to say what they waited for."""
LOOPBACK: Final = "127.0.0.1"
PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that ended by itself and not well; a negative `returncode` is the signal that killed it."""

    rank: int
    returncode: int

    @property
    def signal_name(self) -> str | None:
        """Such as SIGKILL; None if the rank exited."""
        if self.returncode >= 0:
            return None
        known = {each.value: each.name for each in signal.Signals}
        return known.get(-self.returncode, "a real-time signal")

    def describe(self) -> str:
        """One line, such as `rank 2 was killed by signal 9 (SIGKILL)`."""
        if self.signal_name is None:
            return f"rank {self.rank} exited with code {self.returncode}"
        return f"rank {self.rank} was killed by signal {-self.returncode} ({self.signal_name})"


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How every rank ended, in rank order, and why.

    `stopped` are the ranks that the launcher had to signal, so their codes are not their own doing;
    `interrupted_by` is the first signal that ended the whole run. `silent` are the ranks that
    did not answer the others, each with whether a signal had stopped it.
    """

    exit_codes: tuple[int, ...]
    first_failure: Failure | None
    stopped: frozenset[int]
    interrupted_by: signal.Signals | None
    silent: Mapping[int, bool] = field(default_factory=dict)

    def describe(self) -> str | None:
        """The failure to name first, such as `rank 1 did not answer: it was stopped by a signal`."""
        if not self.silent:
            return None if self.first_failure is None else self.first_failure.describe()
        ranks = sorted(self.silent)
        more = ": it was stopped by a signal" if all(self.silent.values()) else " and was killed"
        if len(ranks) > 1:
            more = ": a signal had stopped them" if all(self.silent.values()) else " and were killed"
        return f"{named(ranks)} did not answer{more}"

    @property
    def exit_code(self) -> int:
        """What the launcher should exit with.

        0 if all ranks did; 128 + signal if an interruption ended them, as shells expect (130 is Ctrl-C);
        2, bad usage, if every rank that failed by itself says so; else 1.
        """
        if not any(self.exit_codes):
            return 0
        if self.interrupted_by is not None and self.first_failure is None:
            return 128 + self.interrupted_by
        failed = {code for rank, code in enumerate(self.exit_codes) if code and rank not in self.stopped}
        return 2 if failed == {2} else 1


class Place(Protocol):
    """Where on this machine the ranks run."""

    def address(self, rank: int) -> str:
        """Of a rank, as all the others see it."""

    def listen_address(self, rank: int) -> str:
        """Where a server of a rank listens, so that all reach it, and the rank itself at 127.0.0.1."""

    def command(self, rank: int, argv: Sequence[str]) -> Sequence[str]:
        """What to start so that `argv` runs where `rank` is, in the same process."""

    def environ(self, rank: int) -> Mapping[str, str]:
        """What `rank` finds in its environment, beside or instead of what all ranks do."""

    def run_inside(self, rank: int, work: Callable[[], T]) -> T:
        """What `work` returns when we run it where `rank` is; servers that it starts stay there."""


def launch(
    command: Sequence[str],
    processes: int,
    *,
    grace_s: float,
    environ: Mapping[str, str] | None = None,
    place: Place | None = None,
) -> LaunchOutcome:
    """Run `command` as ranks 0 to `processes` - 1 on this machine and wait until all have ended.

    The ranks inherit stdout, stderr and `environ` (None: ours), and run at `place` (None: beside us).
    `grace_s` is how long ranks may go on after one has failed or the run was interrupted. Raises `ValueError`
    for fewer than one process and `OSError` if the command cannot be started; no rank is left running,
    whatever happens.
    """
    if processes < 1:
        raise ValueError(f"processes = {processes}: must be at least 1. Start one or more.")
    place = place or _Here()
    store = place.run_inside(0, lambda: _host_store(place.listen_address(0)))
    shared = _shared_environ(os.environ if environ is None else environ, processes, place.address(0), store)
    with recorded_signals() as received:
        ranks = _Ranks(grace_s=grace_s, received=received, culprits=lambda: _culprits(store))
        try:
            ranks.start(command, processes, shared, place)
            ranks.wait()
        finally:
            ranks.kill()
    return ranks.outcome()


class _Ranks:
    """The running children; what happens to them is decided once every `POLL_S`."""

    def __init__(
        self, *, grace_s: float, received: list[signal.Signals], culprits: Callable[[], list[int]]
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.grace_s = grace_s
        self.received = received  # filled by the signal handler, in the order of arrival
        self.culprits = culprits  # who does not answer, as the others tell
        self.silent: dict[int, bool] = {}
        self.heeded = 0  # how many of the received signals have been acted upon
        self.first_failure: Failure | None = None
        self.stopped: set[int] = set()
        self.terminate_at_s = float("inf")
        self.kill_at_s = float("inf")

    def start(self, command: Sequence[str], processes: int, shared: Mapping[str, str], place: Place) -> None:
        die_with_parent = _die_with_parent(os.getpid())
        for rank in range(processes):
            argv = place.command(rank, command)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **place.environ(rank)}
            # Forking beside the store's threads is safe here: all that runs before exec is a system call.
            child = subprocess.Popen(argv, env={**shared, **own}, preexec_fn=die_with_parent)  # noqa: PLW1509
            self.processes.append(child)

    def wait(self) -> None:
        """Until every rank has ended, by itself or because it had to."""
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
        """Pass on what reached only us. A second interruption cuts the grace short."""
        for number in self.received[self.heeded :]:
            if number != signal.SIGINT or not shares_terminal():
                self.send(number)
            self.stop_within(self.grace_s if self.heeded == 0 else 0.0)
            self.heeded += 1

    def notice_failure(self) -> None:
        """Remember the first rank that failed by itself.

        Of those that ended within one look, one that was killed comes first: its end is what the others saw.
        """
        ended = [(rank, child.returncode) for rank, child in enumerate(self.processes) if child.returncode]
        if self.first_failure or self.received or not ended:
            return
        rank, returncode = min(ended, key=lambda each: (each[1] > 0, each[0]))
        self.first_failure = Failure(rank=rank, returncode=returncode)
        self.stop_within(self.grace_s)

    def heed_verdict(self) -> None:
        """Once a rank has failed: kill those that the others call silent, and soon all that are left."""
        if self.first_failure is None or self.silent:
            return
        running = self.running()
        self.silent = {
            rank: _is_stopped(self.processes[rank].pid) for rank in self.culprits() if rank in running
        }
        if not self.silent and running and all(_is_stopped(self.processes[rank].pid) for rank in running):
            self.silent = dict.fromkeys(running, True)  # no rank is left to say so
        for rank in self.silent:
            self.stopped.add(rank)
            self.processes[rank].kill()
        if self.silent:
            self.kill_at_s = min(self.kill_at_s, time.monotonic() + KILL_AFTER_VERDICT_S)

    def escalate(self) -> None:
        """SIGTERM when the grace is over, SIGKILL when that did not help either."""
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
        """Leave no process behind; after `wait` none is left."""
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
        )


# ---- the store and the environment -------------------------------------------------------------------------


class _Here:
    """Beside us: ranks that meet at the loopback interface."""

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
    """The store at which the ranks meet; it serves as long as the object lives.

    It is given a socket that is already bound, as it would otherwise listen on every interface. We reach it
    at the loopback address, which has a name on every machine: torch warns of addresses that have none.
    """
    # torch.distributed has it as well, but hides it from type checkers.
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((address, 0), backlog=1024)
    port: int = listener.getsockname()[1]
    # detach: the store closes the socket when it goes.
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _culprits(store: TCPStore) -> list[int]:
    """Ranks that others have found silent."""
    if not store.check([CULPRITS_KEY]):
        return []
    return [int(rank) for rank in store.get(CULPRITS_KEY).decode().split(",")]


def _is_stopped(pid: int) -> bool:
    """Whether a signal, or a debugger, has stopped the process; unknown (False) where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _shared_environ(
    environ: Mapping[str, str], processes: int, address: str, store: TCPStore
) -> dict[str, str]:
    """What all ranks find in their environment."""
    ours = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 connects to our store instead of hosting its own
        "PENSTOCK_LAUNCHED": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {"OMP_NUM_THREADS": "1", **environ, **ours}


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Something for a child to run before its command, so that the kernel kills it when `parent` dies.

    Linux only (None elsewhere, where `kill -9` of the parent leaves the ranks to notice by themselves). The
    kernel goes by the thread that started the child, and that one waits for it in `launch`. The library is
    loaded here, since between fork and exec a child should do as little as it can.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_for_signal() -> None:
        if prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses PR_SET_PDEATHSIG")
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask_for_signal
