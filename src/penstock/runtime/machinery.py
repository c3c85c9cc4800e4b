"""The machinery on which a step runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from penstock.runtime.lanes import Lanes
from penstock.runtime.transport import Transports
from penstock.topology import Control, Layout


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

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which tasks compute: this precision, whatever the caller has switched on."""
        device, dtype = self.device.type, self.autocast_dtype
        if dtype is None and not torch.is_autocast_enabled(device):
            return nullcontext()  # entering and leaving a real context takes 4 us, a third of a small segment
        return torch.autocast(device, dtype=dtype, enabled=dtype is not None)

    def without_callers_autocast(self) -> AbstractContextManager[Any]:
        """Return a context for half a step, so that backward tasks compute as forward ones did."""
        device = self.device.type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
