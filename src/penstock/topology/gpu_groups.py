"""Process groups of GPUs: of the back end of the device alone, connected and tried when they are made.

What differs between devices is in `penstock.device`. Here is the order, which must be the same on all ranks:
groups are made one after the other, and each has a first exchange at once. So connections are built before
the first step, and a fault of the network names the group and not a task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from penstock.config import ConfigError
from penstock.device import device_of, gpu_of
from penstock.mesh import Axes, Group
from penstock.topology.control import CommunicationError
from penstock.topology.faults import is_watched, reason
from penstock.topology.meeting_point import within

SUMS: Final = frozenset({Group.WORLD, Group.EXPERT_DATA, Group.DATA})
"""Groups that sum. The others send rows from rank to rank, for which NCCL has connections of another kind."""


def prepare(device: torch.device, environ: MutableMapping[str, str]) -> None:
    """Set, where they are unset, the variables with which GPUs work best together; does nothing on a CPU.

    It has effect before the first use of the device, in part before its first process group. Raises
    ConfigError for one that makes lanes wait for each other.
    """
    kind = device_of(device)
    kind.set_environment(environ)
    for name, (value, why, hint) in kind.refused.items():
        if environ.get(name) == value:
            raise ConfigError(name, value, why, hint)


def options_of(device: torch.device, ranks: tuple[int, ...]) -> Mapping[str, Any]:
    """Return with what `new_group` makes a group of a lane."""
    kind = device_of(device)
    if not kind.is_gpu:
        return {"backend": kind.backend}
    return gpu_of(device).group_options(device, connects=len(ranks) > 1)


@contextmanager
def left_to_the_watch(device: torch.device, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let the device's back end not end this process by itself where ranks watch each other.

    It would, with a number in place of the task, before the watch has found out who is lost. A variable that
    a user has set stays as it is; torch's elastic agent, and so torchrun, sets it to 1 for every rank.
    """
    name = device_of(device).ends_process
    given = environ.get(name) if name else None
    by_agent = given == "1" and "TORCHELASTIC_RUN_ID" in environ
    if not name or not is_watched() or not (given is None or by_agent):
        yield
        return
    environ[name] = "0"
    try:
        yield
    finally:
        if given is None:
            del environ[name]
        else:
            environ[name] = given


def first_exchange(
    group: ProcessGroup, kind: Axes, ranks: tuple[int, ...], device: torch.device, timeout_s: float
) -> None:
    """Let the ranks of a group exchange a number, in the way that the group is for.

    Raises CommunicationError that names the group, which is then aborted.
    """
    if not device_of(device).is_gpu or len(ranks) == 1:
        return
    numbers = torch.zeros(len(ranks), device=device)

    def exchange() -> None:
        device_of(device).make_current(device)  # of this thread
        if kind in SUMS:
            dist.all_reduce(numbers, group=group)
        else:
            dist.all_to_all_single(torch.empty_like(numbers), numbers, group=group)
        device_of(device).synchronize(device)

    try:
        with named_failure(kind, ranks, device, timeout_s, "is made, but its first exchange did not end"):
            within(timeout_s, exchange)
    except CommunicationError:
        with suppress(RuntimeError):  # the first error is the one to report
            gpu_of(device).abort([group])
        raise


@contextmanager
def named_failure(
    kind: Axes, ranks: tuple[int, ...], device: torch.device, timeout_s: float, what: str
) -> Iterator[None]:
    """Turn an error of a group of GPUs into a CommunicationError that names the group."""
    try:
        yield
    except RuntimeError as error:
        if not device_of(device).is_gpu:
            raise
        why = "no answer" if isinstance(error, dist.DistStoreError) else reason(error)
        backend = gpu_of(device).collectives
        raise CommunicationError(
            f"rank {dist.get_rank()}: the {backend} group {Group.name(kind)} of ranks "
            f"{', '.join(map(str, ranks))} {what} within {timeout_s:g} s ({why}). Check that these ranks "
            f"run, have a GPU each, and reach each other on the interface that {backend} uses, which "
            "NCCL_DEBUG=INFO shows."
        ) from error
