"""The limits of this process's control groups on processor time and memory, by cgroups version 1 or 2.

A container sees all processors and all memory of its host; only its control groups say what it may use. A
group's limit holds for the groups below it, so the smallest limit on the way up counts.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

ROOT = Path("/")
MEMORY = Path("/proc/meminfo")
LARGEST_BYTES = 1 << 60
"""Version 1 expresses no limit by a number near the largest possible one."""


def cpu_limit(root: Path = ROOT) -> float | None:
    """Return how many processors' worth of time this process may use; None without a limit.

    root: of the file system from which /proc and the mounted groups are read.
    """
    periods = _read(root, "cpu", "cpu.cfs_period_us")
    pairs = [text.split() for text in _read(root, "", "cpu.max")]
    pairs += map(list, zip(_read(root, "cpu", "cpu.cfs_quota_us"), periods, strict=True))
    # No limit is -1 in version 1 and `max` in version 2.
    return min((int(quota) / int(period) for quota, period in pairs if quota.isdecimal()), default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the bytes that this process and those in its groups may use; None without a limit."""
    texts = [*_read(root, "", "memory.max"), *_read(root, "memory", "memory.limit_in_bytes")]
    limits = [int(text) for text in texts if text.isdecimal()]
    return min((limit for limit in limits if limit < LARGEST_BYTES), default=None)


def free_memory_bytes() -> int:
    """Return the bytes that new processes can have without anything being swapped out."""
    lines, limit = _lines(MEMORY), memory_limit()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not free:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free[0] if limit is None else min(free[0], limit)


def _read(root: Path, controller: str, name: str) -> list[str]:
    """Return file `name` of this process's group and of those above it that are mounted here.

    controller: of version 1; "" for version 2. See proc(5), /proc/pid/mountinfo.
    """
    own, found = _own_group(root, controller), list[str]()
    if own is None:
        return []
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, kind = line.partition(" - ")
        (_, _, _, top, place, *_), (system, *_, options) = mounted.split(), kind.split()
        if system != ("cgroup" if controller else "cgroup2") or controller not in ("", *options.split(",")):
            continue
        # Where a container has mounted groups of its host, its own group may be outside of what is visible.
        inside = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
        files = [root / place.lstrip("/") / each / name for each in (inside, *inside.parents)]
        found += [file.read_text(encoding="utf-8").strip() for file in files if file.is_file()]
    return found


def _own_group(root: Path, controller: str) -> PurePosixPath | None:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):  # version 2 has one line without controllers
            return PurePosixPath(path)
    return None


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; [] where the system has no such file, or forbids reading it."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
