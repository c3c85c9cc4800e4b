"""How this process finds the others: alone, or started by torchrun, mpirun, Slurm's srun, or Penstock itself.

`detect` finds out who started this process, `join` connects, `leave` disconnects. Launchers pass this only in
environment variables, which are read here and nowhere else.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist

# torch.distributed exports these as well, but hides them from type checkers.
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store

from penstock.config import UNSET, ConfigError
from penstock.device import device_of
from penstock.topology.control import CommunicationError, Control, host_group, limit_exchanges
from penstock.topology.faults import (
    FaultWatcher,
    has_ended,
    is_watched,
    named,
    reason,
    watch,
)
from penstock.topology.groups import TransportName, prepare
from penstock.topology.meeting_point import (
    SPARE_S,
    VARIABLE,
    check_interface,
    check_open_files,
    interface_names,
    is_loopback,
    open_store,
    remedy,
    why_unreachable,
    within,
)
from penstock.topology.notes import JOB_KEY, MET_KEY, underlying

_WATCHED: Final[WeakSet[ProcessGroup]] = WeakSet()
"""Default groups of others whose ranks watch each other."""

_CHANGES: Final = ExitStack()
"""Puts back what `join` has changed in this process besides connecting it."""

MOST_DIGITS = 9
POLL_S: Final = 0.005
"""How often rank 0 looks who has come."""
Launcher = Literal["alone", "torchrun", "mpirun", "slurm", "penstock"]

MPIRUN: Final = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""What Open MPI, and MPICH and Intel MPI, call a process's rank, the number of ranks, its rank in a node."""
PALS: Final = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK")
"""The same of Cray's PALS. Slurm's `srun` leaves them on a Cray, too, beside its own."""


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """The place of this process among those that were started together.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of processes.
        local_rank: Number of this process in its node, from 0.
        launcher: What started them.
    """

    rank: int
    world_size: int
    local_rank: int
    launcher: Launcher


ALONE: Final = ProcessInfo(rank=0, world_size=1, local_rank=0, launcher="alone")
"""A process that was not started as one of several."""


def detect(environ: Mapping[str, str]) -> ProcessInfo | None:
    """Return this process's rank as its launcher left it in `environ`; None if it is not one of several.

    Raises:
        ConfigError: Variables are missing or contradict each other; it names one of them.
    """
    if any(environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        launcher: Launcher = "penstock" if environ.get("PENSTOCK_LAUNCHED") else "torchrun"
        return _identity(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", launcher)
    for names in MPIRUN:  # before Slurm, whose step may be one of mpirun's own daemons
        if all(map(environ.get, names)) and _whole(environ, names[1]) > 1:
            return _identity(environ, *names, "mpirun")
    # A batch script has SLURM_PROCID=0 and its job's SLURM_NTASKS, yet is one process: it has no step id.
    is_script = environ.get("ENVIRONMENT") == "BATCH" and not environ.get("SLURM_STEP_ID")
    # The step's own count comes first, since a step may be part of its job.
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    numbered = environ.get("SLURM_PROCID") and environ.get(size_name)
    if not is_script and numbered and _whole(environ, size_name) > 1:
        return _identity(environ, "SLURM_PROCID", size_name, "SLURM_LOCALID", "slurm")
    if all(map(environ.get, PALS)) and _whole(environ, PALS[1]) > 1:
        return _identity(environ, *PALS, "mpirun")
    # A part of what mpirun leaves: each would train alone. A program that has made its group knows better.
    for rank_name, size_name, local_name in () if dist.is_initialized() else MPIRUN:
        if environ.get(rank_name) and _whole(environ, size_name) > 1:
            return _identity(environ, rank_name, size_name, local_name, "mpirun")
    return None


def rendezvous_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `env://` needs, for a process that Slurm started.

    A MASTER_ADDR or MASTER_PORT that the user set is kept. Otherwise the address is the first host of the
    step, since SLURM_LAUNCH_NODE_IPADDR is where srun was called, which may be a login node; and the port
    follows from the job id, so that all ranks agree on it and two jobs on a node rarely meet.
    """
    info = detect(environ)
    if info is None or info.launcher != "slurm":
        why = "this process was not started by srun"
        raise ConfigError("SLURM_PROCID", UNSET, why, "Start it with srun.")
    host = environ.get("MASTER_ADDR")
    if not host:
        name = next((n for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if environ.get(n)), None)
        if name is None:
            raise ConfigError(
                "MASTER_ADDR", UNSET, "is not set, and Slurm lists no nodes", "Set MASTER_ADDR."
            )
        # A list like `node[003-008,12],other` begins with node003. Every bracket is replaced by the first
        # number inside it; then only a comma can end the first name.
        host = re.sub(r"\[(\w+)[^\[\]]*\]", r"\1", environ[name]).split(",")[0]
        if not re.fullmatch(r"[\w.-]+", host):
            raise ConfigError(
                name, environ[name], "is not a list of hosts", "Set MASTER_ADDR to rank 0's host."
            )
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + _whole(environ, "SLURM_JOB_ID") % 20000),
        **_torchrun_env(info),
    }


def _torchrun_env(info: ProcessInfo) -> dict[str, str]:
    """Return the variables of torchrun, the only ones that libraries such as accelerate read."""
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
    }


def meeting_place(info: ProcessInfo, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port at which the ranks that a launcher started meet.

    Raises:
        ConfigError: The launcher left none; it names the variable.
    """
    if info.launcher == "slurm":
        environ = {**environ, **rendezvous_env(environ)}
    if not (address := environ.get("MASTER_ADDR")):
        hint = "Set it to the host of rank 0, or start with torchrun, which does."
        raise ConfigError("MASTER_ADDR", UNSET, "is not set, so the ranks cannot find each other", hint)
    port = _whole(environ, "MASTER_PORT")
    if not 0 < port < 2**16:
        hint = "Use a free port such as 29500."
        raise ConfigError("MASTER_PORT", port, "must be between 1 and 65535", hint)
    return address, port


def join(
    info: ProcessInfo,
    timeout_s: float,
    device: torch.device,
    transport: TransportName = "direct",
    *,
    start_s: float | None = None,
) -> None:
    """Connect this process to the others by Gloo, and by NCCL if `device` is a GPU; alone it opens no port.

    Args:
        timeout_s: Limit of every exchange of Penstock in the default group, in seconds. Others in it are the
            program's, with the limit that torch gives a group.
        transport: How tensors of GPUs travel; where the host's memory stages them, NCCL is left out.
        start_s: Limit of every wait of the rendezvous, in seconds; None = `timeout_s`.

    Raises:
        ConfigError: The launcher left no address, or Gloo is to use an interface that is not there.
        CommunicationError: The others cannot be met in time; the message says what was found.
    """
    host, port = ("localhost", 0) if info == ALONE else meeting_place(info, os.environ)
    if info.launcher == "slurm":
        os.environ.update(rendezvous_env(os.environ))
    elif info.launcher == "mpirun":
        os.environ.update(_torchrun_env(info))
    prepare(device, os.environ)
    device_of(device).make_current(device)
    check_interface(os.environ)
    check_open_files(info.world_size, by_nccl=device_of(device).is_gpu and transport != "staged")
    _name_loopback(host)
    start_s = start_s or timeout_s
    store: Store = HashStore() if info == ALONE else _store(info, host, port, start_s)
    # In torch's default process group every rank connects to every other.
    backend = "gloo" if transport == "staged" else device_of(device).backend
    start = partial(
        dist.init_process_group,
        backend=backend,
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=timedelta(seconds=start_s),
    )
    try:
        within(start_s + SPARE_S, start)
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {info.rank} of {info.world_size} has met the others, and could not connect to them within "
            f"{start_s:g} s ({reason(error)}). {remedy(error, os.environ)}."
        ) from error
    if info.world_size == 1:
        return
    limit_exchanges(timeout_s)
    held_by = None if is_kept_by_launcher() else 0
    limit_s = timeout_s if device_of(device).is_gpu else None
    watch(FaultWatcher(store, info.rank, info.world_size, held_by=held_by, exchange_timeout_s=limit_s))
    underlying(store).add(MET_KEY, 1)
    if device_of(device).is_cpu:
        # Ranks share the cores of a node; more threads than cores makes every one of them slower.
        _CHANGES.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)


def _name_loopback(host: str) -> None:
    """Let Gloo use the interface inside this machine, where the ranks meet there.

    It would look up this host's name to choose an interface, and many hosts' names do not resolve.
    """
    is_near = host == "localhost" or is_loopback(host)
    for name in {"lo", "lo0"} & set(interface_names()) if is_near and VARIABLE not in os.environ else ():
        _CHANGES.callback(os.environ.pop, VARIABLE, None)
        os.environ[VARIABLE] = name


def joined(
    timeout_s: float,
    device: torch.device,
    transport: TransportName = "direct",
    *,
    start_s: float | None = None,
) -> ProcessInfo:
    """Return which process this is; connect it first to others that a launcher started, unless connected.

    Args:
        timeout_s: See `join`.
        device: This process's device.
        transport: See `join`.
        start_s: See `join`.

    Raises:
        CommunicationError: See `join` and `host_group`.
    """
    started = detect(os.environ) or ALONE
    if dist.is_initialized():
        prepare(device, os.environ)
        device_of(device).make_current(device)
        here = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        info = ProcessInfo(**here, local_rank=started.local_rank, launcher=started.launcher)
        if info.world_size > 1:
            host_group(start_s or timeout_s)
            if device_of(device).is_gpu:
                _watch_in_group_of_others(info, timeout_s)
        return info
    join(started, timeout_s, device, transport, start_s=start_s)
    return started


def leave(*, aborts: bool = False) -> None:
    """Disconnect from the others; does nothing for a process that never joined.

    Afterwards torch has as many threads, and Gloo the interface, as before this process joined.

    Args:
        aborts: Whether exchanges that have begun are aborted, as NCCL would otherwise wait for ranks that
            never come.
    """
    watch(None)
    if dist.is_initialized() and aborts:
        _abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()
    _CHANGES.close()


# ---- who this process is -----------------------------------------------------------------------------------


def _identity(
    environ: Mapping[str, str], rank_name: str, size_name: str, local_name: str, launcher: Launcher
) -> ProcessInfo:
    """Return the three numbers under these names. Raises ConfigError if they contradict each other."""
    rank, size, local = (_whole(environ, name) for name in (rank_name, size_name, local_name))
    if size < 1:
        raise ConfigError(size_name, size, "must be at least 1", "Start the processes again.")
    for name, value in ((rank_name, rank), (local_name, local)):
        if value >= size:
            hint = f"Ranks count from 0 to {size - 1}; check how the processes were started."
            raise ConfigError(name, value, f"must be below {size_name} ({size})", hint)
    return ProcessInfo(rank=rank, world_size=size, local_rank=local, launcher=launcher)


def _whole(environ: Mapping[str, str], name: str) -> int:
    """Return the number in variable `name`, which must be set and not be negative."""
    text = environ.get(name, "")
    if not text:
        hint = "Set it for every process (torchrun and srun do), or unset the other variables to run alone."
        raise ConfigError(name, UNSET, "is not set in the environment, though its companions are", hint)
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        why = "must be a whole number of at most nine digits, 0 or more"
        raise ConfigError(name, text, why, "Correct or unset it.")
    return int(text)


# ---- connecting --------------------------------------------------------------------------------------------


def _store(info: ProcessInfo, host: str, port: int, timeout_s: float) -> Store:
    """Return the store at which processes leave their addresses, once all of them have come.

    It may outlive a group and this start of the processes, so every group of every start has names of its
    own. Raises CommunicationError.
    """
    until_s = time.monotonic() + timeout_s
    serves = info.rank == 0 and not is_kept_by_launcher()
    try:
        store = open_store(host, port, timeout_s, serves=serves)
    except RuntimeError as error:
        why = why_unreachable(host, port, reason(error), serves=serves)
        raise CommunicationError(not_joined(info, timeout_s, host, port, why)) from error
    here = PrefixStore("penstock", store)
    left_s = max(0.0, until_s - time.monotonic())
    name = partial(name_of_attempt, here, info.rank, info.world_size, timedelta(seconds=left_s))
    try:
        start = within(left_s + SPARE_S, name)
    except RuntimeError as error:
        others = (
            reason(error) if info.rank == 0 else f"the store is there, and rank 0 is not ({reason(error)})"
        )
        why = (
            f"{others}. Check that all {info.world_size} processes were started and are still running, and "
            "that MASTER_ADDR and MASTER_PORT are the same on all of them"
        )
        raise CommunicationError(not_joined(info, timeout_s, host, port, why)) from error
    if info.rank == 0:
        store.set(JOB_KEY, f"penstock/{start}")
    return PrefixStore(start, here)


def name_of_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return one name on all ranks, which must call this together; every start has a new name.

    torchrun keeps its store when it restarts ranks. What ranks of an earlier start have left there under the
    same name looks like an answer: an address at which no rank listens now. The number of torchrun's restarts
    does not help, since the agents of several machines count differently.

    Rank 0 makes the name up and tells every rank that greets it. A greeting says under which key its answer
    is expected, so no greeting or answer of an earlier start is mistaken. With the name both say how many
    ranks there are.

    Raises:
        RuntimeError: A rank has not come within the timeout.
        ConfigError: This rank and rank 0, or one that has come, were not started as one of as many.
    """
    if rank == 0:
        return _told(store, world_size, time.monotonic() + timeout.total_seconds())
    greeting = secrets.token_hex(8)
    store.set(f"greeting/{rank}", greeting)
    store.wait([f"answer/{greeting}"], timeout)
    name, size = store.get(f"answer/{greeting}").decode().split()
    store.set(f"heard/{name}/{rank}", str(world_size))
    _check_size(rank, world_size, int(size))
    return name


def _check_size(rank: int, size: int, size_of_0: int) -> None:
    if size != size_of_0:
        why = f"rank {rank} was started as one of {size} processes, and rank 0 as one of {size_of_0}"
        raise ConfigError("WORLD_SIZE", size, why, "Give all ranks the same number of processes.")


def _told(store: Store, world_size: int, until_s: float) -> str:
    """Tell a new name to all other ranks until each has confirmed it, and return the name."""
    name, waiting = secrets.token_hex(8), set(range(1, world_size))
    answered: dict[int, bytes] = {}
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"heard/{name}/{rank}"]):
                waiting.remove(rank)
                _check_size(rank, int(store.get(f"heard/{name}/{rank}")), world_size)
            elif store.check([f"greeting/{rank}"]):
                greeting = store.get(f"greeting/{rank}")
                if answered.get(rank) != greeting:
                    store.set(f"answer/{greeting.decode()}", f"{name} {world_size}")
                    answered[rank] = greeting
        if time.monotonic() > until_s:
            verb = "has" if len(waiting) == 1 else "have"
            raise RuntimeError(f"{named(sorted(waiting))} {verb} not come")
        time.sleep(POLL_S)
    return name


def is_kept_by_launcher() -> bool:
    """Return whether a launcher, as torchrun, keeps the store at which ranks meet, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _watch_in_group_of_others(info: ProcessInfo, timeout_s: float) -> None:
    """Let the ranks of a default group that others have made watch each other.

    That is once for every such group, and again after a failure that the program has survived.
    """
    default, control = dist.group.WORLD, Control(info.rank, info.world_size)
    assert default is not None, "ranks have joined"
    if default not in _WATCHED and is_watched():
        return
    if default in _WATCHED and not control.any(has_ended(), "asking whether ranks are watched"):
        return
    _WATCHED.add(default)
    name = control.gather(secrets.token_hex(8), "naming the watch")[0]
    store = PrefixStore(f"penstock-{name}", underlying(_get_default_store()))
    watch(FaultWatcher(store, info.rank, info.world_size, exchange_timeout_s=timeout_s))


def not_joined(info: ProcessInfo, timeout_s: float, host: str, port: int, why: str) -> str:
    """Return the message of a rank that has not met the others.

    Args:
        timeout_s: How long it has tried, in seconds.
        host, port: Where the ranks meet.
        why: What was found there, and what to do about it.
    """
    return (
        f"rank {info.rank} of {info.world_size} could not join the others (from {platform.node()}, at "
        f"{host}:{port}, within {timeout_s:g} s): {why}."
    )
