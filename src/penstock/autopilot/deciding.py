"""Decisions of rank 0 for all ranks: two ranks with different decisions would deadlock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.config import ConfigError
from penstock.topology import Control

T = TypeVar("T")

BEATS = 4
"""How often within the timeout rank 0 signals the others that it is still working."""

LONGEST_BEAT_S = 5.0


@dataclass(frozen=True)
class _Answer(Generic[T]):
    """The decision, or the error that prevented it."""

    value: T | ConfigError


Beat = Callable[[], None]
"""A slow decision calls this regularly, so that the other ranks keep waiting."""


def decided(control: Control, decide: Callable[[], T], purpose: str) -> T:
    """Return what rank 0 decides, on all ranks; a ConfigError that prevents it is raised on all of them."""
    return _taken(control.gather(_answer(decide) if control.rank == 0 else None, purpose)[0])


def decided_slowly(control: Control, decide: Callable[[Beat], T], purpose: str, timeout_s: float) -> T:
    """Return what rank 0 decides, on all ranks, also if that takes longer than `timeout_s`.

    timeout_s: how long ranks wait for each other. decide: gets a function to call more often than every
    `timeout_s`, which keeps the other ranks waiting; otherwise they would consider rank 0 dead.
    """
    if control.rank > 0:
        while (heard := control.gather(None, purpose)[0]) is None:
            pass
        return _taken(heard)
    every_s = min(timeout_s / BEATS, LONGEST_BEAT_S)
    last_s = time.monotonic()

    def beat() -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= every_s:
            control.gather(None, purpose)
            last_s = time.monotonic()

    return _taken(control.gather(_answer(lambda: decide(beat)), purpose)[0])


def _answer(decide: Callable[[], T]) -> _Answer[T]:
    try:
        return _Answer(decide())
    except ConfigError as error:
        return _Answer(error)


def _taken(answer: _Answer[T] | None) -> T:
    assert answer is not None, "rank 0 has decided"
    if isinstance(answer.value, ConfigError):
        raise answer.value
    return answer.value
