"""Peak memory of a stretch of work, from the kernel's own high-water mark (Linux)."""

from __future__ import annotations

from pathlib import Path

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_HIGH_WATER_MARK = "5"


def reset_peak() -> None:
    """Set the high-water mark of resident memory to what is resident now."""
    CLEAR.write_text(RESET_HIGH_WATER_MARK)


def resident_bytes() -> int:
    return _field("VmRSS")


def peak_bytes() -> int:
    """Highest resident memory since `reset_peak`."""
    return _field("VmHWM")


def _field(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
