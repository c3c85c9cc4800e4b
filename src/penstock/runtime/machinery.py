"""The machinery on which a step runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from penstock.device import device_of
from penstock.partial_state import refuse_pickle
from penstock.runtime.executor import Lanes, ThreadLanes
from penstock.runtime.streams import StreamLanes
from penstock.runtime.transport import SilentTransport, Transports
from penstock.topology import Control, Layout
from penstock.topology.device_mesh import RankMeshes


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Everything that a stack runs on. control: all ranks, for checks outside the step."""

    lanes: Lanes
    transports: Transports
    layout: Layout
    control: Control
    device: torch.device
    autocast_dtype: torch.dtype | None = None

    def close(self) -> None:
        """End the machinery's threads and connections, which no stack may use any more."""
        try:
            self.lanes.close()
        finally:
            self.transports.close()

    @cached_property
    def meshes(self) -> RankMeshes:
        """The layout as device meshes; all ranks ask for them together, the first time."""
        return RankMeshes.of(self.layout, self.device.type, self.control)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_pickle("a model or part of one that Penstock runs")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which tasks compute: this precision, whatever the caller has switched on."""
        device, dtype = self.device.type, self.autocast_dtype
        if dtype is None and not torch.is_autocast_enabled(device):
            return nullcontext()  # entering and leaving a real context takes 4 us, a third of a small segment
        # What is cast without autograd has no history, and must not be found by tasks that need gradients.
        return torch.autocast(
            device, dtype=dtype, enabled=dtype is not None, cache_enabled=torch.is_grad_enabled()
        )

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context for half a step.

        The caller's autocast is off, so backward tasks compute as forward ones did. Where tasks compute under
        autocast, their casts of parameters last for the half: autocast forgets them when its outermost
        context is left, and with one context per task every microbatch would cast every parameter, and keep
        the cast for backward.
        """
        device = self.device.type
        if self.autocast_dtype is None and not torch.is_autocast_enabled(device):
            return nullcontext()
        return torch.autocast(device, enabled=False)


def silent(machinery: Machinery) -> Machinery:
    """Return the same machinery with a transport that sends nothing, and lanes of its own."""
    transport = SilentTransport(machinery.layout.mesh, machinery.layout.rank)
    lanes = build_lanes(machinery.device, transport.abort, alone=True)
    return replace(machinery, transports=Transports(transport, transport, sends=False), lanes=lanes)


def build_lanes(device: torch.device, on_failure: Callable[[], None], *, alone: bool = False) -> Lanes:
    """Return the lanes of a device. on_failure: wakes whoever waits in a collective. alone: no task meets
    another rank."""
    if device_of(device).is_gpu:
        return StreamLanes(device, on_failure)
    return ThreadLanes(on_failure, alone=alone)


# ---- how this process treats memory that was freed --------------------------------------------------------


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER, TOP_PAD_BYTES = 2**31 - 1, 64 * 2**20


def keep_freed_memory() -> bool:
    """Keep what tensors free instead of returning it to the kernel; return False where that cannot be set.

    A step on a CPU frees and makes the same tensors as the step before. By default the C library returns
    every large one to the kernel, which then hands out the same memory page by page, each page cleared first.
    Cost: the process stays as large as it ever was. The setting holds for the whole process, from now on.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # a C library that is not glibc
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, TOP_PAD_BYTES))
    return all(mallopt(name, value) == 1 for name, value in settings)
