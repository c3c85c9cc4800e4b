"""The machinery on which a step runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from penstock.partial_state import refuse_pickle
from penstock.runtime.lanes import Lanes
from penstock.runtime.transport import Transports
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
