"""Starts the ranks of this machine by torch's elastic agent, and lets them end as they should.

It is what torchrun does, in this process, but for what users of a failed or interrupted run would miss:

- When one rank fails, torch's agent ends the others within a tenth of a second, so that they cannot report in
  which task they waited for it. Here they get `grace_s` to do that, then SIGTERM, then SIGKILL. A rank that
  does not answer the others is killed as soon as they report it, since it would not heed a SIGTERM either.
- After a signal it gives ranks 30 s, which may not suffice to save a large checkpoint. Here a signal is
  passed on and ends nothing by itself; `grace_s` begins when a rank fails, and a second signal ends it.
- Its store listens on all interfaces. This one listens on the loopback interface, at a port that is bound
  before it is told. It outlives every rank, so they leave there why they end (`penstock.topology.notes`),
  which `LaunchOutcome.describe` repeats in the last line of the run.

Ranks have sessions of their own: Ctrl-C reaches them through this process, and Ctrl-Z stops this process
alone. On Linux a rank also dies when this process does, even by `kill -9`, once it hears signals
(`penstock.stops`).
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

# torch.distributed exports it as well, but hides it from type checkers.
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from penstock.stops import SIGNALS
from penstock.topology.faults import named
from penstock.topology.notes import cause, have_met, report_killed, silent_ranks
from penstock.train.stopping import SignalLog

T = TypeVar("T")

POLL_S: Final = 0.02
KILL_AFTER_TERM_S: Final = 5.0
KILL_AFTER_VERDICT_S: Final = 1.5
"""Seconds for ranks that answer, where others do not: enough to report what they waited for."""
END_UNMET_S: Final = 2.0
"""Seconds for ranks that wait to meet one that has ended: enough to find the same fault."""
LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that ended by itself with a failure; a negative `returncode` is the signal that killed it."""

    rank: int
    returncode: int

    def describe(self) -> str:
        """Return one line, such as `rank 2 was killed by signal 9 (SIGKILL)`."""
        names, number = {each.value: each.name for each in signal.Signals}, -self.returncode
        if number > 0:
            name = names.get(number, "a real-time signal")
            return f"rank {self.rank} was killed by signal {number} ({name})"
        if self.returncode - 128 in SIGNALS:
            return f"rank {self.rank} was stopped by {names[self.returncode - 128]}"
        return f"rank {self.rank} exited with code {self.returncode}"


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How every rank ended, and why.

    Attributes:
        exit_codes: Of all ranks, in their order.
        first_failure: The first rank that failed by itself; None if none did.
        stopped: Ranks that the launcher had to signal, so that their exit codes are not their own.
        interrupted_by: The first signal that ended the whole run; None without one.
        silent: For each rank that did not answer the others, whether a signal had stopped it.
        cause: The rank that failed for a reason of its own, with the reason; or None, with what others waited
            for, as the ranks have said.
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
            one, signalled = len(self.silent) == 1, all(self.silent.values())
            stopped = ": it was stopped by a signal" if one else ": a signal had stopped them"
            more = stopped if signalled else f" and {'was' if one else 'were'} killed"
            return f"{named(sorted(self.silent))} did not answer{more}" + (f"; {why}" if why else "")
        if failure is None or not why:
            return None if failure is None else failure.describe()
        if culprit is None:
            ended = [rank for rank, code in enumerate(self.exit_codes) if code == 0]
            if ended and failure.returncode > 0:  # the others failed as they waited for it
                failure = Failure(rank=ended[0], returncode=0)
            return f"{failure.describe()}; {why}"
        if failure.returncode < 0 and culprit != failure.rank:  # whose death the others failed of
            return failure.describe()
        failure = Failure(rank=culprit, returncode=self.exit_codes[culprit] or failure.returncode)
        return f"{failure.describe()}: {why}"

    @property
    def exit_code(self) -> int:
        """The code with which the launcher should exit.

        0 if all ranks did; 128 + signal if an interruption of the run or of one rank ended them, as shells
        expect (130 is Ctrl-C), and none failed at that; 2, bad usage, if every rank that failed by itself
        exited with it; else 1.
        """
        if not any(self.exit_codes):
            return 0
        failed_then = any(code > 0 and code - 128 not in SIGNALS for code in self.exit_codes)
        first = self.first_failure
        by = self.interrupted_by if first is None else first.returncode - 128
        if by in SIGNALS and not failed_then:
            return 128 + by
        failed = {code for rank, code in enumerate(self.exit_codes) if code and rank not in self.stopped}
        return 2 if failed == {2} else 1


class Place(Protocol):
    """Where on this machine the ranks run, if not beside this process."""

    def address(self, rank: int) -> str:
        """Return the address of a rank, as all the other ranks see it."""

    def listen_address(self, rank: int) -> str:
        """Return where a server of a rank listens, so that all reach it, and the rank itself at 127.0.0.1."""

    def wrapper(self) -> Sequence[str]:
        """Return the command that goes on, at the place of the rank whose RANK it finds, as its arguments."""

    def run_inside(self, rank: int, work: Callable[[], T]) -> T:
        """Return what `work` returns when run at the place of `rank`; servers that it starts stay there."""


def launch(
    command: Sequence[str],
    processes: int,
    *,
    grace_s: float,
    place: Place | None = None,
    hears: bool = False,
    meets: bool = False,
    ended: Callable[[LaunchOutcome], object] | None = None,
) -> LaunchOutcome:
    """Run `command` as ranks 0 to `processes` - 1 on this machine and wait until all have ended.

    The ranks inherit stdout, stderr and the environment.

    Args:
        grace_s: How long ranks may continue after one has failed.
        place: Where the ranks run; None = beside this process.
        hears: Whether the command lets signals through by `penstock.stops`; until then they wait, so that
            none ends Python's own start with a traceback.
        meets: Whether the ranks meet by `penstock.topology.join`, which ends for none if one ends before.
        ended: Called when all ranks have ended, while signals still interrupt nothing.

    Raises:
        ValueError: If `processes` is less than one.
        OSError: If the command cannot be started; no rank is left running, whatever happens.
    """
    if processes < 1:
        raise ValueError(f"processes = {processes}: must be at least 1. Start one or more.")
    if place is None:
        store, address, wrapper = _host_store(LOOPBACK), LOOPBACK, list[str]()
    else:
        listen, address, wrapper = place.listen_address(0), place.address(0), list(place.wrapper())
        store = place.run_inside(0, lambda: _host_store(listen))
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says is said here
    environ = {"PENSTOCK_LAUNCHED": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    entrypoint, *args = ("env", *(f"{name}={value}" for name, value in environ.items()), *wrapper, *command)
    meeting = StaticTCPRendezvous(address, store.port, rank=0, world_size=1, run_id="penstock", timeout=0)
    meeting._store = store  # this agent alone meets, at a store that is there already
    spec = WorkerSpec(
        role="penstock",
        local_world_size=processes,
        rdzv_handler=meeting,
        entrypoint=entrypoint,
        args=tuple(each.replace("$", "$$") for each in args),  # torch takes them for templates
        max_restarts=0,
        monitor_interval=POLL_S,
    )
    with SignalLog() as log:
        agent = _Agent(spec, store, grace_s=grace_s, received=log.received, hears=hears, meets=meets)
        agent.run()
        outcome = agent.outcome()
        if ended is not None:
            ended(outcome)
    return outcome


class _Agent(LocalElasticAgent):
    """torch's agent, which looks after the ranks here until all of them have ended."""

    def __init__(
        self,
        spec: WorkerSpec,
        store: TCPStore,
        *,
        grace_s: float,
        received: list[signal.Signals],
        hears: bool,
        meets: bool,
    ) -> None:
        super().__init__(spec, _NoLogs(), shutdown_timeout=1)
        self.store = store  # where ranks say why they end, and who does not answer
        self.grace_s, self.hears, self.meets = grace_s, hears, meets
        self.received = received  # filled by the signal handler, in the order of arrival
        self.silent: dict[int, bool] = {}
        self.heeded = 0  # how many of the received signals have been acted upon
        self.failed = False  # whether a rank has, by itself or at a signal
        self.first_failure: Failure | None = None
        self.stopped: set[int] = set()
        self.terminate_at_s = self.kill_at_s = float("inf")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # it would take those that are ignored as well
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if self.hears else ())  # ranks inherit that
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Let torch look only when all have ended, as it would end the others at once if one has failed."""
        self.notice_failure()
        if not self.running():
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        self.heed_verdict()
        self.heed_signals()
        self.escalate()
        return RunResult(state=WorkerState.HEALTHY)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        assert isinstance(self._pcontext, SubprocessContext), "ranks are commands, and have been started"
        handlers = self._pcontext.subprocess_handlers
        return [handlers[rank].proc for rank in sorted(handlers)]

    def running(self) -> list[int]:
        return [rank for rank, child in enumerate(self.processes) if child.poll() is None]

    def heed_signals(self) -> None:
        """Pass on signals. The first leaves ranks the time to save; a second interruption ends it."""
        for number in self.received[self.heeded :]:
            self.send(number)
            if self.heeded:
                self.stop_within(0.0)
            self.heeded += 1

    def notice_failure(self) -> None:
        """Begin the grace when a rank has failed, and record the first that did so by itself.

        Of those found together, the first is one that was killed.
        """
        codes = [child.poll() for child in self.processes]
        if self.failed or not any(code is not None for code in codes):
            return
        alone = not self.received and self.meets and None in codes
        unmet = alone and not have_met(self.store, len(codes))
        ended = [(rank, code) for rank, code in enumerate(codes) if code or (unmet and code == 0)]
        if not ended:
            return
        self.failed = True
        self.stop_within(min(self.grace_s, END_UNMET_S) if unmet else self.grace_s)
        if self.received:
            return
        rank, returncode = min(ended, key=lambda each: (each[1] > 0, each[0]))
        self.first_failure = failure = Failure(rank=rank, returncode=returncode)
        if returncode < 0:
            how = failure.describe().partition(" was ")[2]
            report_killed(self.store, rank, len(self.processes), how)

    def heed_verdict(self) -> None:
        """Kill, once a rank has failed, the ranks that the others call silent, and soon all that are left."""
        if not self.failed or self.silent:
            return
        stopped = {rank: _is_stopped(self.processes[rank].pid) for rank in self.running()}
        self.silent = {rank: stopped[rank] for rank in silent_ranks(self.store) if rank in stopped}
        if not self.silent and all(stopped.values()):
            self.silent = stopped  # no rank is left to report it
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

    def outcome(self) -> LaunchOutcome:
        return LaunchOutcome(
            exit_codes=tuple(child.returncode for child in self.processes),
            first_failure=self.first_failure,
            stopped=frozenset(self.stopped),
            interrupted_by=self.received[0] if self.received else None,
            silent=self.silent,
            cause=cause(self.store),
        )


# ---- where ranks meet, and what they print -----------------------------------------------------------------


class _NoLogs(LogsSpecs):
    """Leave what ranks print where it is, and no folder for it."""

    root_log_dir = ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        none = dict.fromkeys(envs, "")
        return LogsDest(stdouts=none, stderrs=none, error_files=none)


def _host_store(address: str) -> TCPStore:
    """Return the store at which ranks meet; given a bound socket, it does not listen on every interface."""
    listener = socket.create_server((address, 0), backlog=1024)
    port: int = listener.getsockname()[1]
    # detach: the store closes the socket when it goes. LOOPBACK has a name everywhere, or torch would warn.
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _is_stopped(pid: int) -> bool:
    """Tell whether a signal or a debugger has stopped the process; False where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
