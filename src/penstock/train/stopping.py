"""Notes requests to stop instead of ending the process: in ranks, which all stop after the same step, and in
the process that starts them, which passes the signals on."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, NamedTuple, Self

from penstock.stops import SAME_REQUEST_S, heeded, leave_lost_terminal
from penstock.topology import Control


class Vote(NamedTuple):
    """What all ranks learn after a step.

    Attributes:
        stop: Whether any rank was asked to stop.
        slowest_s: Seconds of the step on the slowest rank.
        lost: Whether what the run has written is gone.
    """

    stop: bool
    slowest_s: float
    lost: bool


class SignalLog:
    """Notes, while entered, the signals of `penstock.stops`. Signals that are ignored stay so.

    One request can arrive twice, as from timeout(1), which signals its child and then the whole group, so a
    later signal counts only `SAME_REQUEST_S` after the first. Only Python's main thread handles signals; in
    another thread they are left as they are.

    Args:
        once: Whether a second signal acts as it did before.

    Attributes:
        received: The signals, in the order of arrival.
    """

    def __init__(self, *, once: bool = False) -> None:
        self.received: list[signal.Signals] = []
        self._once, self._first_s = once, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in heeded():
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        leave_lost_terminal()
        now_s = time.monotonic()
        if not self.received:
            self._first_s = now_s
        elif now_s - self._first_s <= SAME_REQUEST_S:
            return
        elif self._once:
            self.__exit__()
            signal.raise_signal(number)
            return
        self.received.append(signal.Signals(number))


class StopRequests(SignalLog):
    """Requests to stop this rank, and the votes by which all ranks learn of them.

    All ranks enter it together: whatever the first prints from then on, a signal ends none of them early.
    """

    def __init__(self, control: Control) -> None:
        super().__init__(once=True)
        self._control = control

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._control.barrier("beginning what a signal can stop")
        except BaseException as error:
            self.__exit__(error)
            raise
        return self

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to stop; others may not know yet."""
        return bool(self.received)

    def agreed(self, step: int, iteration_s: float = 0.0, *, lost: bool = False) -> Vote:
        """Return whether any rank was asked to stop, and what else all must know after a step.

        It costs one all-reduce of 24 bytes: every rank learns the same.

        Args:
            iteration_s: Seconds of the step on this rank.
            lost: Whether this rank has lost what the run has written.
        """
        purpose = f"agreeing whether to stop after step {step}"
        stop, slowest_s, gone = self._control.largest((float(self.asked), iteration_s, float(lost)), purpose)
        return Vote(bool(stop), slowest_s, bool(gone))
