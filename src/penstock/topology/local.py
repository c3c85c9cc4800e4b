"""Finds how many processes serve this machine best, within the limits of this process's control groups.

A container sees all processors and all memory of its host; only its control groups (cgroups version 1 or 2)
say what it may use. A group's limit holds for groups below it, so the smallest limit on the way up counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from penstock.config import ConfigError
from penstock.device import best_kind, count_gpus, device_of
from penstock.topology.groups import ParallelConfig
from penstock.words import counted

ROOT = Path("/")
LARGEST_BYTES = 1 << 60
"""Version 1 expresses no limit by a number near the largest possible one."""
CACHED = ("active_file", "inactive_file", "slab_reclaimable")
"""What a group's use of memory counts as well, and the kernel gives to processes before it ends one. Files in
/dev/shm are not among it."""


def cpu_limit(root: Path = ROOT) -> float | None:
    """Return how many processors' worth of time this process may use; None without a limit.

    Args:
        root: Root of the file system from which /proc and the mounted groups are read.
    """
    periods = _read(root, "cpu", "cpu.cfs_period_us")
    pairs = [text.split() for text in _read(root, "", "cpu.max")]
    pairs += map(list, zip(_read(root, "cpu", "cpu.cfs_quota_us"), periods, strict=True))
    # No limit is -1 in version 1 and `max` in version 2.
    return min((int(quota) / int(period) for quota, period in pairs if quota.isdecimal()), default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the bytes that this process and those in its groups may use; None without a limit."""
    return min((limit for limit, _ in _memory(root)), default=None)


def free_memory_bytes(root: Path = ROOT) -> int:
    """Return the bytes that new processes can have without anything being swapped out."""
    lines = _lines(root / "proc/meminfo")
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not free:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free + [max(0, limit - kept) for limit, kept in _memory(root)])


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each group that has one, and the bytes there that the kernel does not take back."""
    files = ("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    for controller, limit, usage in files:
        for group in _groups(root, controller):
            limits = [int(text) for text in _lines(group / limit) if text.isdecimal()]
            if limits and limits[0] < LARGEST_BYTES:
                counts = dict(line.split() for line in _lines(group / "memory.stat"))
                # In version 1 the plain counts are those of the group alone.
                cached = sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in CACHED)
                yield limits[0], max(0, sum(map(int, _lines(group / usage))) - cached)


def _read(root: Path, controller: str, name: str) -> list[str]:
    """Return file `name` of this process's group and of those above it that are mounted here."""
    files = (group / name for group in _groups(root, controller))
    return [file.read_text(encoding="utf-8").strip() for file in files if file.is_file()]


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of those above it that are mounted here.

    controller: of version 1; "" for version 2. See proc(5), /proc/pid/mountinfo.
    """
    groups = (line.split(":", 2) for line in _lines(root / "proc/self/cgroup"))
    # Version 2 has one line without controllers.
    own = next((PurePosixPath(path) for _, of, path in groups if controller in of.split(",")), None)
    if own is None:
        return
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, kind = line.partition(" - ")
        (_, _, _, top, place, *_), (system, *_, options) = mounted.split(), kind.split()
        if system != ("cgroup" if controller else "cgroup2") or controller not in ("", *options.split(",")):
            continue
        # Where a container has mounted groups of its host, its own group may be outside of what is visible.
        inside = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
        for each in (inside, *inside.parents):
            yield root / place.lstrip("/") / each


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; [] where the system has no such file, or forbids reading it."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


STAGED = "parallel.transport=staged"
LEAST = 2
"""Least number of processes: with fewer there is nothing to send and nothing to overlap."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """What local processes can have for themselves: one each of `number` GPUs or processor cores.

    Attributes:
        number: How many there are.
        gpus: Whether they are GPUs, and not processor cores.
        cores: Number of cores, where a limit on processor time allows fewer; 0 = all may be used.
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
    Where `check` refuses them all, the answer is the number of places, and building the run raises the error.

    Args:
        places: What processes can have for themselves.
        check: Raises ConfigError for a number of processes that cannot share something.

    Raises:
        ConfigError: There are more processes than GPUs, and these may not share one; or tensors are to be
            staged, and there is no GPU.
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
    best: int = max(least, places.number)
    above = range(0) if exclusive else range(best + 1, 4 * best + 1)
    wanted: list[int] = [*range(best, least - 1, -1), *above]
    for number in wanted:
        with suppress(ConfigError):
            check(number)
            return number
    return best


def nothing_to_stage(found: str) -> ConfigError:
    """Return the error of a run that stages the tensors of GPUs in the host's memory, and has no GPU."""
    why = f"{found}, and processors exchange what is in the host's memory anyway"
    hint = 'Leave it out (it is "direct"), or let this process see a GPU (CUDA_VISIBLE_DEVICES).'
    return ConfigError("parallel.transport", "staged", why, hint)


def staging_device() -> torch.device:
    """Return the kind of device whose tensors are staged.

    Raises:
        ConfigError: There is no GPU.
    """
    device = best_kind()
    if not device_of(device).is_gpu:
        raise nothing_to_stage("this process sees no GPU")
    return device
