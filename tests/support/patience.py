"""Waiting in tests: for what happens, as long as it takes. Only a hang is a failure, never a slow machine."""

# ruff: noqa: TID251 - has the functions that wait; all others call these

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")

HANG_S: Final = 240.0
"""After this many seconds a wait counts as a hang, however busy the machine is."""

POLL_S: Final = 0.01

OWN_TIME: Final = """
from types import SimpleNamespace
from penstock import stops
stops.time = SimpleNamespace(**vars(stops.time) | {"monotonic": stops.time.process_time})
"""
"""Lines of a program that is asked to stop: its patience counts processor time, so it cannot be too slow."""


def wait_for(condition: Callable[[], object], what: str = "it") -> None:
    """Return once the condition holds."""
    until_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until_s, f"{what} did not happen"
        time.sleep(POLL_S)


def outcome_of(work: Callable[[], T]) -> T:
    """What `work` returns or raises, in a thread of its own; AssertionError if it hangs."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    wait_for(outcome.done, "the end of the call")
    return outcome.result()
