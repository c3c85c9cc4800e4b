"""Numbers and sizes for people."""

from __future__ import annotations


def counted(number: int, word: str, plural: str = "s") -> str:
    """`1 chunk`, `2 chunks`."""
    return f"{number} {word}{plural if number != 1 else ''}"


def mib(size_bytes: float) -> str:
    """For people."""
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.0f} KiB"


def gib(size_bytes: float) -> str:
    """For people."""
    size = size_bytes / 2**30
    if size < 1:
        return f"{1024 * size:.0f} MiB"
    return f"{size:.2f} GiB" if size < 10 else f"{size:.1f} GiB"


def milliseconds(seconds: float) -> str:
    """For people: four digits or more."""
    value = 1000 * seconds
    places = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:.{places}f} ms"


def change(seconds: float, base_s: float) -> str:
    """`+3 %`, `-31 %`; one digit behind the point where it is small."""
    percent = 100 * (seconds / base_s - 1)
    return f"{percent:+.0f} %" if abs(percent) >= 10 else f"{percent:+.1f} %"
