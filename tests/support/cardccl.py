"""What NCCL is for GPUs, for the device of `tests.support.card`: a back end for its tensors alone.

Gloo moves the numbers, and what matters is as with NCCL: a process group of this back end refuses tensors of
the CPU; an exchange whose peers do not come, fail or die ends with no error and after no timeout, and only by
`abort` on its own rank, which leaves any numbers and no error. An aborted group refuses what follows. An
abort waits for what the device still runs, and so for exchanges of other groups until these are aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, HashStore
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map

from tests.support.patience import HANG_S

NAME = "cardccl"
KIND = "card"


class Communicator:
    """The connections of one process group."""

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, size: int) -> None:
        self.host = dist.ProcessGroup(HashStore(), rank, size)
        self.host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self.running, self.aborted = set[dist.Work](), False

    def abort(self) -> None:
        """Let whoever waits in an exchange go on, and no other exchange begin."""
        with DEVICE:
            self.aborted = True
            DEVICE.notify_all()
            DEVICE.wait_for(lambda: all(each.aborted for each in [*COMMUNICATORS.values()] if each.running))

    def wait(self, work: dist.Work) -> None:
        """Wait for an exchange, or its abort. One that fails is not over, as nothing tells its kernel."""
        with DEVICE:
            if self.aborted:
                return
            self.running.add(work)

        def run() -> None:
            with suppress(RuntimeError):
                work.wait()
                self._end(work)

        threading.Thread(target=run, name="cardccl", daemon=True).start()
        with DEVICE:
            DEVICE.wait_for(lambda: self.aborted or work not in self.running)
        self._end(work)

    def _end(self, work: dist.Work) -> None:
        with DEVICE:
            self.running.discard(work)
            DEVICE.notify_all()


DEVICE = threading.Condition()
"""What the device has to do: it changes as exchanges begin, end and are aborted."""

COMMUNICATORS: dict[object, Communicator] = {}


def register() -> None:
    """Make the back end known in this process."""
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=[KIND])


def _create(options: Any, more: Any) -> dist.ProcessGroupGloo:
    del more
    rank, size = options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(options.store, rank, size, timedelta(seconds=10 * HANG_S))
    COMMUNICATORS[gloo] = Communicator(gloo, rank, size)
    return gloo


def communicator_of(group: dist.ProcessGroup) -> Communicator | None:
    """Return the connections of a group of this back end; None for one of another."""
    with suppress(RuntimeError):  # it has no back end for this device
        return COMMUNICATORS.get(group._get_backend(torch.device(KIND)))
    return None


def exchange(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator of c10d whose tensors are those of the CPU that cards hold."""
    boxed = next(each for each in args if _is_group(each))
    communicator = communicator_of(dist.ProcessGroup.unbox(boxed))
    if communicator is None:
        return func(*args, **kwargs)
    if communicator.aborted:
        raise dist.DistBackendError("the communicator was aborted")
    inside = communicator.host.boxed()
    out = func(*[inside if each is boxed else each for each in args], **kwargs)

    def waited(each: Any) -> Any:
        if not isinstance(each, torch.ScriptObject):
            return each
        communicator.wait(dist.Work.unbox(each))
        return FakeWork().boxed()

    return tree_map(waited, out)


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


@contextmanager
def as_default(backend: str = NAME) -> Iterator[dist.ProcessGroup]:
    """Let a new process group of all ranks be the default one, as if others had made it."""
    before = dist.group.WORLD
    made = dist.new_group(backend=backend)
    distributed_c10d._update_default_pg(made)
    try:
        yield made
    finally:
        distributed_c10d._update_default_pg(before)
