"""Peak memory of a stretch of work, from the kernel's own high-water mark (Linux)."""

from __future__ import annotations

import ctypes
from pathlib import Path

from penstock.writing import write_setting

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_HIGH_WATER_MARK = "5"


def start_peak() -> int:
    """Give freed memory back to the kernel and reset the high-water mark; returns the resident bytes.

    Otherwise a step would run in memory that an earlier step left and show no peak at all.
    """
    ctypes.CDLL(None).malloc_trim(0)
    write_setting(CLEAR, RESET_HIGH_WATER_MARK)
    return _field("VmRSS")


def peak_bytes() -> int:
    """Return the highest resident memory since `start_peak`, bytes."""
    return _field("VmHWM")


def _field(name: str) -> int:
    line = next(
        line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}:")
    )
    return int(line.split()[1]) * 1024
