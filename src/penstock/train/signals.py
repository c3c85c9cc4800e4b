"""Records interruptions of the process that starts the ranks, which passes them on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from penstock.stops import SAME_REQUEST_S, heeded, leave_lost_terminal


@contextmanager
def recorded_signals() -> Iterator[list[signal.Signals]]:
    """Record requests to stop in the list instead of ending this process, unless they were ignored before.

    One request can arrive twice, as from timeout(1), which signals its child and then the whole group, so a
    later signal is listed only `SAME_REQUEST_S` after the first. Python lets only the main thread handle
    signals; called in another thread, this leaves them as they are.
    """
    received: list[signal.Signals] = []
    first_s = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        del frame
        leave_lost_terminal()
        now_s = time.monotonic()
        if not received:
            first_s = now_s
        elif now_s - first_s < SAME_REQUEST_S:
            return
        received.append(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {each: signal.signal(each, note) for each in heeded()}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
