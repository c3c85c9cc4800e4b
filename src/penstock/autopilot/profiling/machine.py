"""The machine that a cluster file names."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from penstock import __version__
from penstock.cost.cluster_file import Machine
from penstock.topology import Control

CPU_INFO, MEMORY_INFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")


def here(device: torch.device) -> Machine:
    """This machine, now."""
    return Machine(
        host=platform.node(),
        date=datetime.now(UTC).date().isoformat(),
        processor=_field(CPU_INFO, "model name") or platform.machine(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        python=platform.python_version(),
        torch=torch.__version__,
        penstock=__version__,
    )


def memory_bytes(control: Control, device: torch.device) -> int | None:
    """Of one device: of the GPU, or this rank's part of the host's. None where the system does not say."""
    hosts = control.gather(platform.node(), "counting ranks per host")
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = _field(MEMORY_INFO, "MemTotal")
    return None if total is None else int(total.split()[0]) * 1024 // hosts.count(platform.node())


def _field(path: Path, name: str) -> str | None:
    """Value of the first line `name : value`; None where Linux does not run, or does not say."""
    if not path.exists():
        return None
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), None)
