"""Finds how many processes serve this machine best."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.config import ConfigError
from penstock.device import best_kind, count_gpus, device_of
from penstock.topology.cgroup import cpu_limit
from penstock.topology.groups import ParallelConfig
from penstock.words import counted

STAGED = "parallel.transport=staged"
LEAST = 2
"""Least number of processes: with fewer there is nothing to send and nothing to overlap."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """What local processes can have for themselves: one each of `number` GPUs or processor cores.

    cores: number in the machine, where a limit on processor time allows fewer; 0 = all may be used.
    """

    number: int
    gpus: bool
    cores: int = 0

    @staticmethod
    def here() -> Places:
        """Return this machine's GPUs, or the cores that this process may use.

        These are the cores to which the process is bound, and no more than its container has processor time
        for.
        """
        if gpus := count_gpus():
            return Places(number=gpus, gpus=True)
        bound, limit = len(os.sched_getaffinity(0)), cpu_limit()
        if limit is None or limit >= bound:
            return Places(number=bound, gpus=False)
        return Places(number=max(1, int(limit)), gpus=False, cores=bound)

    def describe(self, processes: int) -> str:
        """Return how `processes` share the places, in words."""
        kind = "GPU" if self.gpus else "processor core"
        where = f"{counted(processes, 'process', 'es')} on {counted(self.number, kind)}"
        if not self.gpus:
            limit = f" (there are {self.cores}, and a limit of the container or job allows no more time)"
            return f"{where}{limit if self.cores else ''}, {self.threads(processes)}"
        if processes == 1:
            return f"{where}: nothing is sent, so a schedule has nothing to hide and all take the same time"
        return f"{where}, one each" if processes <= self.number else f"{where}, which they share"

    def threads(self, processes: int) -> str:
        """Return how many threads each process computes with, in words: ranks that share a node have one."""
        if processes > 1:
            return "one thread each"
        return counted(min(self.number, torch.get_num_threads()), "thread")


def limit_threads() -> None:
    """Limit the threads of a lone process to its processor time, since torch counts cores alone."""
    here = Places.here()
    if not here.gpus and here.cores and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(here.number, torch.get_num_threads()))


def local_processes(parallel: ParallelConfig, places: Places, check: Callable[[int], object]) -> int:
    """Return how many processes to start: `parallel.processes`, or the number that serves the machine best.

    More processes than places only wait for each other, fewer leave places idle: the answer is the largest
    number from two up to that of the places (at least two) that `check` accepts, or else the smallest above.
    NCCL takes one process for each GPU: there the answer is at most their number, and on one GPU it is one.
    check: raises ConfigError for a number of processes that cannot share something. Where it refuses them
    all, the answer is the number of places, and building the run raises the error.

    Raises:
        ConfigError: for more processes than GPUs, unless these may share one; for tensors that are to be
            staged where there is no GPU.
    """
    if parallel.transport == "staged" and not places.gpus:
        raise nothing_to_stage("this machine shows no GPU")
    exclusive = places.gpus and parallel.transport == "direct"
    if parallel.processes is not None:
        if exclusive and parallel.processes > places.number:
            raise ConfigError(
                "parallel.processes",
                parallel.processes,
                f"this machine has {counted(places.number, 'GPU')}, and NCCL takes one process for each",
                f"Use {places.number} at most, let processes share a GPU with {STAGED}, or hide GPUs "
                "(CUDA_VISIBLE_DEVICES=) and compute on cores.",
            )
        return parallel.processes
    least = 1 if exclusive else LEAST
    best = max(least, places.number)
    above = range(0) if exclusive else range(best + 1, 4 * best + 1)
    wanted = (*range(best, least - 1, -1), *above)
    return next((number for number in wanted if _is_possible(number, check)), best)


def nothing_to_stage(found: str) -> ConfigError:
    """Return the error of a run that stages the tensors of GPUs in the host's memory, and has no GPU."""
    why = f"{found}, and processors exchange what is in the host's memory anyway"
    hint = 'Leave it out (it is "direct"), or let this process see a GPU (CUDA_VISIBLE_DEVICES).'
    return ConfigError("parallel.transport", "staged", why, hint)


def staging_device() -> torch.device:
    """Return the kind of device whose tensors are staged. Raises ConfigError where there is no GPU."""
    device = best_kind()
    if not device_of(device).is_gpu:
        raise nothing_to_stage("this process sees no GPU")
    return device


def _is_possible(number: int, check: Callable[[int], object]) -> bool:
    try:
        check(number)
    except ConfigError:
        return False
    return True
