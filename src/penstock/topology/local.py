"""How many processes serve this machine best."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.config import ConfigError
from penstock.topology.groups import ParallelConfig

LEAST = 2
"""With fewer there is nothing to send and nothing to overlap."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """What local processes can have for themselves: one each of `number` GPUs or processor cores."""

    number: int
    gpus: bool

    @staticmethod
    def here() -> Places:
        """This machine's GPUs, or the cores that this process may use."""
        if torch.cuda.is_available():
            return Places(number=torch.cuda.device_count(), gpus=True)
        return Places(number=len(os.sched_getaffinity(0)), gpus=False)

    def describe(self, processes: int) -> str:
        """How `processes` share the places, in words."""
        if self.gpus:
            share = "one each" if processes <= self.number else "shared"
            return f"{processes} processes on {self.number} GPUs, {share}"
        return f"{processes} processes on {self.number} processor cores, one thread each"


def local_processes(parallel: ParallelConfig, places: Places, check: Callable[[int], object]) -> int:
    """How many processes to start: as many as `parallel.processes` says, or as serve the machine best.

    More processes than places only wait for each other, fewer leave places idle: the answer is the largest
    number up to that of the places, and at least two, that check does not refuse, or else the smallest above.
    check: raises ConfigError for a number of processes that something cannot be shared by. Where it refuses
    them all, the answer is the number of places, and whoever builds the run gets the error.
    """
    if parallel.processes is not None:
        return parallel.processes
    best = max(LEAST, places.number)
    wanted = (*range(best, LEAST - 1, -1), *range(best + 1, 4 * best + 1))
    return next((number for number in wanted if _is_possible(number, check)), best)


def _is_possible(number: int, check: Callable[[int], object]) -> bool:
    try:
        check(number)
    except ConfigError:
        return False
    return True
