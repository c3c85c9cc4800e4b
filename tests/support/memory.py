"""Memory that is measured without what the C library keeps for later."""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD, ARENA_MAX = -3, -8
"""Of mallopt(3)."""


def give_back_what_is_freed() -> None:
    """Make the C library return every tensor's memory at once, so that what is measured is what is held."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(MMAP_THRESHOLD, 16384) == 1 and libc.mallopt(ARENA_MAX, 1) == 1
