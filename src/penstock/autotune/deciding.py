"""Decisions of rank 0 for all ranks: two ranks with different decisions would deadlock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
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


def decided(control: Control, decide: Callable[[], T], purpose: str) -> T:
    """Return what rank 0 decides, on all ranks; a ConfigError that prevents it is raised on all of them."""
    return _taken(control.gather(_answer(decide) if control.rank == 0 else None, purpose)[0])


def decided_slowly(control: Control, decide: Callable[[], T], purpose: str, timeout_s: float) -> T:
    """Return what rank 0 decides, on all ranks, also if that takes longer than `timeout_s`.

    A thread of rank 0 decides, so that the others hear of it however long a single thought takes.

    Args:
        control: Of all ranks, which call this together.
        decide: Is called on rank 0.
        purpose: In words, for errors.
        timeout_s: How long ranks wait for each other.

    Raises:
        ConfigError: What prevents the decision, on all ranks.
    """
    if control.rank > 0:
        while (heard := control.gather(None, purpose)[0]) is None:
            pass
        return _taken(heard)
    found: SimpleQueue[_Answer[T] | BaseException] = SimpleQueue()

    def think() -> None:
        try:
            found.put(_answer(decide))
        except BaseException as error:  # of any kind: it is raised where the caller waits
            found.put(error)

    Thread(target=think, name="penstock-decision", daemon=True).start()
    while (answer := _soon(found, min(timeout_s / BEATS, LONGEST_BEAT_S))) is None:
        control.gather(None, purpose)
    if isinstance(answer, BaseException):
        raise answer
    return _taken(control.gather(answer, purpose)[0])


def _soon(found: SimpleQueue[T], seconds: float) -> T | None:
    """Return what comes within some seconds, or None."""
    try:
        return found.get(timeout=seconds)
    except Empty:
        return None


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
