"""Describes the machine that a cluster file names."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from penstock import __version__
from penstock.cost.cluster_file import Machine
from penstock.device import device_of
from penstock.topology import Control
from penstock.train.fits import device_bytes

CPU_INFO = Path("/proc/cpuinfo")


def here(device: torch.device) -> Machine:
    """Describe this machine as it is now."""
    return Machine(
        host=platform.node(),
        date=datetime.now(UTC).date().isoformat(),
        processor=_field(CPU_INFO, "model name") or platform.machine(),
        device=device_of(device).name(device),
        python=platform.python_version(),
        torch=torch.__version__,
        penstock=__version__,
    )


def memory_bytes(control: Control, device: torch.device) -> int:
    """Return the memory in bytes of the rank that has least, on all ranks; all call it together.

    A rank has what is free of its GPU, its part of that, or of what its machine, container or job may use.
    Call it when process groups have been used: communicators of GPUs take memory beside tensors.
    """
    hosts = control.gather(platform.node(), "counting ranks per host")
    sharing = 1 if device_of(device).is_gpu else hosts.count(platform.node())
    return min(control.gather(device_bytes(device, control) // sharing, "comparing memory of ranks"))


def _field(path: Path, name: str) -> str | None:
    """Return the value of the first line `name : value`; None outside Linux, or without such a line."""
    if not path.exists():
        return None
    lines = (line.partition(":") for line in path.read_text(encoding="utf-8").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), None)
