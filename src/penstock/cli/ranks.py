"""Start and end of a command's ranks: the same command once more for each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from penstock.cli.run import BAD_USAGE, FAILED, INTERRUPTED, put, say, tell, tell_torchrun
from penstock.config import ConfigError, load
from penstock.device import pick_device
from penstock.graph import RefusalError
from penstock.plan.plan_config import AUTO
from penstock.runtime import ScheduleMismatchError, TaskError
from penstock.runtime.machinery import keep_freed_memory
from penstock.stops import STOPS, mute
from penstock.topology import (
    CommunicationError,
    Control,
    Layout,
    ParallelConfig,
    ProcessInfo,
    detect,
    find_node_size,
    join,
    leave,
)
from penstock.topology.faults import give_up, is_first_to_say
from penstock.topology.join import ALONE
from penstock.topology.local import Places, local_processes
from penstock.topology.meeting_point import check_interface, check_open_files
from penstock.train.assemble import check_processes
from penstock.train.config import RunConfig
from penstock.train.launcher import LaunchOutcome, Place, launch

T = TypeVar("T")

NOTHING_MEASURED = "stopped; nothing had been measured yet"
UNPRINTED = "stopped while the result was being saved or printed"
SPARE_S = 10.0
PROGRAM = "penstock"


class Emulated(Protocol):
    """A cluster that the lab emulates for the ranks of a command; `--emulate` asks for it."""

    @property
    def ranks(self) -> int: ...

    @property
    def devices(self) -> int:
        """Ranks of every node."""

    @property
    def shape(self) -> object:
        """What is printed, such as 2x4."""

    def cluster(self) -> AbstractContextManager[Place]:
        """Return what makes the cluster, and removes it when it is left."""


def on_ranks(
    name: str,
    given: Sequence[str],
    processes: int,
    timeout_s: float,
    emulate: Emulated | None,
    work: Callable[[ProcessInfo], int],
    program: str = PROGRAM,
    *,
    reports: bool = False,
) -> int:
    """Start the ranks of a command, or be one of them and do its `work`; return the exit code.

    Args:
        name: The command, for error messages.
        given: The arguments of the command.
        processes: How many ranks to start where no cluster is emulated.
        timeout_s: Seconds after which ranks that wait for others give up.
        emulate: The cluster to emulate; None = the ranks run beside each other.
        work: Does a rank's part of the command and returns its exit code.
        program: The module whose arguments these are.
        reports: Whether ranks that fail print a report of their own.

    Raises:
        ConfigError: If ranks cannot be started, or were started by another launcher and are to be emulated.
    """
    info = detect(os.environ)
    if emulate is not None and info is not None and info.launcher != "penstock":
        why = f"ranks that {info.launcher} started already have a network"
        raise ConfigError(
            "--emulate", str(emulate.shape), why, f"Start {name} itself, or leave --emulate out."
        )
    if info is None and emulate is not None:
        with emulate.cluster() as cluster:
            return start_ranks(given, emulate.ranks, timeout_s, cluster, program=program, reports=reports)
    if info is None and processes > 1:
        return start_ranks(given, processes, timeout_s, program=program, reports=reports)
    info = info or ALONE
    try:
        code = work(info)
    except KeyboardInterrupt:
        code = STOPS.stopped()
    except BrokenPipeError:  # nobody reads the result
        mute(1)
        code = 0
    return end_of_rank(info, code)


def ranks_of(config: RunConfig, info: ProcessInfo | None, emulate: Emulated | None) -> int:
    """Return the number of ranks: what a launcher has started or a cluster is to have; else local processes.

    Those are as many as configured, or as suit this machine best.
    """
    if info is not None:
        return info.world_size
    if emulate is not None:
        say_unused(config.parallel.processes, emulate)
        return emulate.ranks

    def check(processes: int) -> None:
        resolved = config.resolved(processes)
        if config.plan.layout != AUTO:
            Layout.build(resolved.parallel, processes, 0, resolved.moe.num_experts)

    return local_processes(config.parallel, Places.here(), check)


def say_unused(processes: int | None, emulate: Emulated) -> None:
    """Say if not as many ranks are started as parallel.processes asks for."""
    if processes not in (None, emulate.ranks):
        why = f"--emulate {emulate.shape} starts {emulate.ranks} ranks"
        say(f"parallel.processes = {processes} is not used: {why}")


def measured_run(
    path: Path | None,
    overrides: Sequence[str],
    sample: Sequence[str],
    info: ProcessInfo | None,
    emulate: Emulated | None,
) -> tuple[RunConfig, int]:
    """Return the run whose tasks a command measures, resolved, and its number of ranks.

    Where no file is given and no model is named, it is the command's `sample`, with an expert for every rank.
    """
    if emulate is not None:
        sample = [each for each in sample if not each.startswith("parallel.processes=")]
    usual = () if path is not None else sample
    config = load(RunConfig, path, [*usual, *overrides])
    if usual and (config.model.preset is not None or config.model.config is not None):
        usual, ranks = (), [each for each in sample if each.startswith("parallel.")]
        config = load(RunConfig, None, [*ranks, *overrides])
    count = ranks_of(config, info, emulate)
    if usual:
        config = load(RunConfig, None, [*usual, f"moe.num_experts={max(2, count)}", *overrides])
    return config.resolved(count), count


def start_ranks(
    given: Sequence[str],
    processes: int,
    timeout_s: float,
    place: Place | None = None,
    way_out: Callable[[], str] | None = None,
    program: str = PROGRAM,
    *,
    reports: bool = False,
    announced: str = "",
) -> int:
    """Start the ranks, wait for them, and return the exit code of all together.

    Args:
        given: Arguments of the module `program`, which lets signals through.
        processes: How many ranks to start.
        timeout_s: Seconds after which ranks that wait for others give up.
        place: Where the ranks run; None = as plain processes of this machine.
        way_out: Returns what to say after a failure.
        reports: Whether ranks that fail have said why.
        announced: A text that is printed once nothing has been refused.
    """
    check_processes(processes)
    check_open_files(processes)
    if place is None and not reports:
        check_interface(os.environ)  # an emulated cluster has interfaces of its own; a doctor reports it
    if announced:
        put(announced)
    command = [sys.executable, "-m", program, *given]
    # After a failure the others need up to one timeout to notice it and to say what they waited for.
    try:
        outcome = launch(
            command,
            processes,
            grace_s=timeout_s + SPARE_S,
            place=place,
            hears=True,
            meets=not reports,  # a doctor waits for those who do not come, and says who
            ended=_note_end,
        )
    except OSError as error:
        why = f"this machine could not start them all ({error.strerror or error})"
        raise ConfigError("parallel.processes", processes, why, "Start fewer.") from error
    failure = outcome.first_failure
    reported = failure is None or (reports and failure.returncode == FAILED)
    if not reported and outcome.exit_code not in (BAD_USAGE, INTERRUPTED):
        more = f"; {way_out()}" if way_out else ""
        print(f"penstock: {outcome.describe()}{more}", file=sys.stderr)
    return outcome.exit_code


def _note_end(outcome: LaunchOutcome) -> None:
    """Say what a stop has left if the first rank could not; from now on a stop changes nothing."""
    if outcome.interrupted_by is not None and outcome.exit_codes[0] < 0:
        STOPS.say()
    STOPS.finish(outcome.exit_code)


def measure_as_rank(
    info: ProcessInfo,
    parallel: ParallelConfig,
    num_experts: int,
    measure: Callable[[Layout, torch.device], T],
    finish: Callable[[T], int],
) -> int:
    """Join the other ranks, measure, leave, and return the exit code; rank 0 finishes with the result.

    A stop may come while an error is being reported: the other ranks end at the same signal, and this one may
    see that first.

    Args:
        parallel: The settings by which the ranks share work and connect.
        num_experts: Experts of an MoE layer.
        measure: Measures on every rank.
        finish: Takes the result on rank 0 and returns the exit code.
    """
    try:
        try:
            keep_freed_memory()
            device = pick_device(info.local_rank)
            join(info, parallel.timeout_s, device, parallel.transport, start_s=parallel.start_s)
            node_size = find_node_size(Control(info.rank, info.world_size), info.local_rank)
            layout = Layout.build(parallel, info.world_size, info.rank, num_experts, node_size)
            result = measure(layout, device)
            STOPS.finish(None, UNPRINTED)
        except (ConfigError, RefusalError) as error:
            return refused(error)
        except (TaskError, CommunicationError, ScheduleMismatchError) as error:
            if STOPS.heard:  # others ended at the same signal
                raise KeyboardInterrupt from None
            tell(str(error))
            return FAILED
        leave()
        return finish(result) if info.rank == 0 else 0
    except KeyboardInterrupt:
        return STOPS.stopped()


def refused(error: ConfigError | RefusalError) -> int:
    """Return the exit code of a rank that has found an unusable setting.

    Of ranks with the same fault one reports it; ranks without the fault are told why this one ends.
    """
    text = str(error)
    if is_first_to_say(text):
        say(text)
    tell_torchrun(text)
    give_up(text)
    return BAD_USAGE


def end_of_rank(info: ProcessInfo, code: int) -> int:
    """Return the exit code of a rank that has closed and flushed all it has, or cannot.

    One of several ranks exits at once instead: a Gloo thread that still holds the last exchange's tensor
    needs the interpreter to free it, and aborts the process if the interpreter is shutting down by then.
    After a failure, destroying the process group in order could wait for peers that are gone.
    """
    if info.world_size > 1:
        with suppress(OSError):  # nobody is there to read it
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


# ---- what a training run leaves that does not end by itself ---------------------------------------------


NONE_YET = "no checkpoint has been written yet"


class Left:
    """The checkpoints of one run, which an earlier run in the same folder has no part in.

    It is made before the run begins; a run that continues has the checkpoints that are there then, too.
    """

    def __init__(self, config: RunConfig) -> None:
        self._folder, self._steps = config.output.dir / "checkpoints", config.train.steps
        self._earlier: frozenset[tuple[int, int]] = frozenset()
        if config.train.resume is False:
            self._earlier = frozenset(map(_identity, self._found()))

    def way_out(self) -> str:
        """Return, for after a failure, from where the run can be continued."""
        newest = self._newest()
        return NONE_YET if newest is None else f"continue from {newest.name} with train.resume=true"

    def by_a_stop(self) -> str:
        """Return the same for after a stop, which may find that the last step has been saved."""
        from penstock.checkpoint.folder import step_of

        newest = self._newest()
        if newest is not None and step_of(newest) >= self._steps:
            return f"stopped after the last step; {newest.name} is saved"
        return f"stopped; {self.way_out()}"

    def _newest(self) -> Path | None:
        own = [path for path in self._found() if _identity(path) not in self._earlier]
        return own[-1] if own else None

    def _found(self) -> list[Path]:
        from penstock.checkpoint.folder import complete_checkpoints

        with suppress(OSError):  # this error must not hide why the run has ended
            return complete_checkpoints(self._folder)
        return []


def _identity(path: Path) -> tuple[int, int]:
    """Return what a folder keeps when it is moved aside."""
    try:
        status = path.stat()
    except OSError:  # it has just been removed, as an old checkpoint
        return (0, 0)
    return (status.st_dev, status.st_ino)
