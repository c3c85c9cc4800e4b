"""What a stage is given: which rank this is, its device, and how much it should do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.cost import ClusterFile
from penstock.device import device_of
from penstock.topology import Control, ProcessInfo
from penstock.train.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much the stages do.

    rounds: of the lanes. repeats: of a step, in races and waits. steps: measured of every schedule. budget_s:
    of the curves. largest_bytes: of a collective; 0 = no more than a profile has. judged: whether times say
    anything about this device; on processors that stand in for GPUs they do not.
    """

    rounds: int
    repeats: int
    steps: int
    budget_s: float
    largest_bytes: int
    judged: bool

    @staticmethod
    def of(device: torch.device) -> Scale:
        """Return the usual scale on a device."""
        if device_of(device).is_gpu:
            return Scale(rounds=1000, repeats=20, steps=7, budget_s=60, largest_bytes=1 << 30, judged=True)
        return Scale(rounds=50, repeats=3, steps=3, budget_s=6, largest_bytes=0, judged=False)


@dataclass(frozen=True, kw_only=True)
class Here:
    """A rank in a stage. config: resolved; the run for which curves and predictions are. cluster: what the
    curves have found; None if they have not been measured.
    """

    info: ProcessInfo
    device: torch.device
    config: RunConfig
    scale: Scale
    cluster: ClusterFile | None = None

    @property
    def world_size(self) -> int:
        return self.info.world_size

    @property
    def control(self) -> Control:
        return Control(self.info.rank, self.info.world_size)


def timed(here: Here, action: Callable[[], object]) -> tuple[float, float]:
    """Run an action that all ranks start together; return the seconds until it was issued, and done."""
    kind = device_of(here.device)
    kind.synchronize(here.device)
    here.control.barrier("starting what is timed")
    start_s = time.perf_counter()
    action()
    issued_s = time.perf_counter() - start_s
    kind.synchronize(here.device)
    return issued_s, time.perf_counter() - start_s
