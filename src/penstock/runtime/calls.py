"""What lanes run: the calls of a compiled plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.graph import Lane, Task

MOST_KEPT = 32
"""Compiled plans that a stack remembers: a comparison runs several in turn."""


@dataclass(frozen=True, slots=True)
class Call:
    """One task, ready to run.

    reads: for every role the slots on its edges. writes: outputs that are read, and their slots. frees: slots
    that are not read after this call. shared: slots whose readers on several lanes find out which is the
    last. waits: for other lanes, how many of their calls in this span must have ended before.
    """

    task: Task
    handler: Callable[..., Mapping[str, Any]]
    reads: tuple[tuple[str, tuple[int, ...]], ...]
    writes: tuple[tuple[str, int], ...]
    frees: tuple[int, ...]
    shared: tuple[int, ...]
    waits: tuple[tuple[Lane, int], ...]


Span = Mapping[Lane, tuple[Call, ...]]
"""The calls of every lane between two stops."""
