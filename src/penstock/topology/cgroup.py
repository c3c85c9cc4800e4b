"""The limits of this process's control groups on processor time and memory, by cgroups version 1 or 2.

A container sees all processors and all memory of its host; only its control groups say what it may use. A
group's limit holds for the groups below it, so the smallest limit on the way up counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
MEMORY = Path("/proc/meminfo")
LARGEST_BYTES = 1 << 60
"""Version 1 expresses no limit by a number near the largest possible one."""


@dataclass(frozen=True, kw_only=True)
class _Mount:
    """A mounted hierarchy. top: the group that is at `place`; controllers: of version 1, () in version 2."""

    place: Path
    top: PurePosixPath
    controllers: tuple[str, ...]


def cpu_limit(root: Path = ROOT) -> float | None:
    """Return how many processors' worth of time this process may use; None without a limit.

    root: of the file system from which /proc and the mounted groups are read.
    """
    limits = [
        *(_quota(*text.split()) for text in _read(root, "", "cpu.max") if len(text.split()) == 2),
        *(
            _quota(*both)
            for both in zip(
                _read(root, "cpu", "cpu.cfs_quota_us"), _read(root, "cpu", "cpu.cfs_period_us"), strict=True
            )
        ),
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the bytes that this process and those in its groups may use; None without a limit."""
    texts = [*_read(root, "", "memory.max"), *_read(root, "memory", "memory.limit_in_bytes")]
    limits = [int(text) for text in texts if text.isdecimal()]
    return min((limit for limit in limits if limit < LARGEST_BYTES), default=None)


def free_memory_bytes() -> int:
    """Return the bytes that new processes can have without anything being swapped out."""
    with suppress(OSError, StopIteration):
        line = next(
            line
            for line in MEMORY.read_text(encoding="utf-8").splitlines()
            if line.startswith("MemAvailable:")
        )
        free, limit = int(line.split()[1]) * 1024, memory_limit()
        return free if limit is None else min(free, limit)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _quota(quota_us: str, period_us: str) -> float | None:
    """Return the limit in processors; None without one, which is -1 in version 1 and `max` in version 2."""
    is_limited = quota_us.isdecimal() and period_us.isdecimal() and int(period_us) > 0
    return int(quota_us) / int(period_us) if is_limited else None


def _read(root: Path, controller: str, name: str) -> list[str]:
    """Return file `name` of this process's group and the groups above. controller: "" for version 2."""
    files = (folder / name for folder in _folders(root, controller))
    return [file.read_text(encoding="utf-8").strip() for file in files if file.is_file()]


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's group's folder, and those of the groups above it that are mounted here."""
    own = _own_group(root, controller)
    for mount in _mounts(root):
        if own is None or (controller not in mount.controllers if controller else bool(mount.controllers)):
            continue
        # Where a container has mounted groups of its host, its own group may be outside of what is visible.
        inside = own.relative_to(mount.top) if own.is_relative_to(mount.top) else PurePosixPath()
        yield from (mount.place / each for each in (inside, *inside.parents))


def _own_group(root: Path, controller: str) -> PurePosixPath | None:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):  # version 2 has one line without controllers
            return PurePosixPath(path)
    return None


def _mounts(root: Path) -> Iterator[_Mount]:
    """Yield where groups are mounted; see proc(5), /proc/pid/mountinfo."""
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, kind = line.partition(" - ")
        fields, (system, *rest) = mounted.split(), kind.split()
        if system in ("cgroup", "cgroup2"):
            controllers = tuple(rest[-1].split(",")) if system == "cgroup" else ()
            place = root / fields[4].lstrip("/")
            yield _Mount(place=place, top=PurePosixPath(fields[3]), controllers=controllers)


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; [] where the system has no such file, or forbids reading it."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
