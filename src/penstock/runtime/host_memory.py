"""How this process treats memory that was freed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER, TOP_PAD_BYTES = 2**31 - 1, 64 * 2**20


def keep_freed_memory() -> bool:
    """Keep what tensors free instead of returning it to the kernel; return False where that cannot be set.

    A step on a CPU frees and makes the same tensors as the step before. By default the C library returns
    every large one to the kernel, which then hands out the same memory page by page, each page cleared first.
    Cost: the process stays as large as it ever was. The setting holds for the whole process, from now on.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # a C library that is not glibc
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, TOP_PAD_BYTES))
    return all(mallopt(name, value) == 1 for name, value in settings)
