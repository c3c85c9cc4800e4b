"""The machine that a result is from: what matters for its speed, nothing that names it or its owner."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

CPU_INFO, MEMORY_INFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Neither host names nor paths are among these.

    Attributes:
        cores: How many cores this process may use.
        kernel: Name and version, without what a distributor adds to it.
        date: The date of the measurement, UTC, YYYY-MM-DD.
        commit: The commit of the source, shortened, with `+` if files differ; None outside a repository.
    """

    cores: int
    cpu: str
    memory_bytes: int
    kernel: str
    python: str
    torch: str
    date: str
    commit: str | None

    @staticmethod
    def here() -> Machine:
        """Return this machine, now (Linux)."""
        return Machine(
            cores=len(os.sched_getaffinity(0)),
            cpu=_field(CPU_INFO, "model name") or platform.machine(),
            memory_bytes=int((_field(MEMORY_INFO, "MemTotal") or "0 kB").split()[0]) * 1024,
            kernel=f"{platform.system()} {_version(platform.release())}",
            python=platform.python_version(),
            torch=torch.__version__,
            date=datetime.now(UTC).date().isoformat(),
            commit=commit_of(Path(__file__).parent),
        )

    def lines(self) -> list[tuple[str, str]]:
        """Return what to show: name and value of each fact."""
        facts = [
            ("processor", f"{self.cpu}, {self.cores} cores"),
            ("memory", f"{self.memory_bytes / 2**30:.1f} GiB"),
            ("system", self.kernel),
            ("Python", self.python),
            ("PyTorch", self.torch),
            ("date", self.date),
        ]
        return facts if self.commit is None else [*facts, ("commit", self.commit)]

    @property
    def words(self) -> str:
        """In one line what tells it from another one, and one measurement from another."""
        facts = [self.cpu, f"{self.cores} cores", self.date]
        return ", ".join(facts if self.commit is None else [*facts, f"commit {self.commit}"])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def commit_of(folder: Path) -> str | None:
    """Return the commit of the repository that holds `folder`; None if there is none, or no git to ask."""
    revision = _git(folder, "rev-parse", "--short=10", "HEAD")
    if revision is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}+" if changes else revision


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if it fails: then there is no repository to name."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(release: str) -> str:
    """Return `6.1.90` of `6.1.90-something`."""
    match = re.match(r"\d+(\.\d+)*", release)
    return match[0] if match else release


def _field(path: Path, name: str) -> str | None:
    """Return value of the first line `name : value`; some processors have no model name."""
    lines = (line.partition(":") for line in path.read_text(encoding="utf-8").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), None)
