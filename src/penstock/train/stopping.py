"""Stops a run cleanly: requests to stop are noted, and all ranks stop after the same step."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from penstock.stops import SAME_REQUEST_S, heeded, leave_lost_terminal
from penstock.topology import Control


@dataclass(frozen=True, kw_only=True)
class Vote:
    """What all ranks learn after a step.

    slowest_s: duration of the step on the slowest rank. lost: whether what the run has written is gone.
    """

    stop: bool
    slowest_s: float
    lost: bool = False


class StopRequests:
    """Notes, while entered, the signals of `penstock.stops`; a second one acts as it did before.

    Signals that are ignored stay so. One Ctrl-C can arrive twice, from the terminal and from a launcher that
    passes it on, so a second signal counts as a second one only `SAME_REQUEST_S` after the first.
    """

    def __init__(self, control: Control) -> None:
        self._control, self._asked, self._asked_s = control, False, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        for number in heeded():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to stop; others may not know yet."""
        return self._asked

    def agreed(self, step: int, iteration_s: float = 0.0, *, lost: bool = False) -> Vote:
        """Return whether any rank was asked to stop, and what else all must know after a step.

        It costs one all-reduce of 24 bytes: every rank learns the same.
        """
        purpose = f"agreeing whether to stop after step {step}"
        stop, slowest_s, gone = self._control.largest((float(self._asked), iteration_s, float(lost)), purpose)
        return Vote(stop=bool(stop), slowest_s=slowest_s, lost=bool(gone))

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        leave_lost_terminal()
        now_s = time.monotonic()
        if self._asked and now_s - self._asked_s > SAME_REQUEST_S:
            self._restore()
            signal.raise_signal(number)
        elif not self._asked:
            self._asked, self._asked_s = True, now_s

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
