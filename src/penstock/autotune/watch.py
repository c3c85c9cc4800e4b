"""Detects that the step time has changed. Pure logic: times go in, an alarm comes out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median, median_high, median_low


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A change of the step time since the plan was adopted. Medians, in seconds."""

    before_s: float
    now_s: float

    @property
    def ratio(self) -> float:
        return self.now_s / self.before_s


class Watch:
    """Compares the last steps with the first ones under the same plan.

    The first `settling` steps are ignored; the median of the following `lasting_steps` steps is the baseline.
    It raises the alarm when the median of the last `lasting_steps` differs by more than `threshold` (1.15
    times or 1/1.15 at 0.15), in either direction, and both halves of these steps agree: a shorter
    disturbance does not count. After an alarm the baseline restarts, so one change is one alarm.

    All ranks pass the same times, so all see the same alarm after the same step.
    """

    def __init__(self, threshold: float, lasting_steps: int, settling: int) -> None:
        self.threshold, self.lasting_steps, self.settling = threshold, lasting_steps, settling
        self.reset()

    def reset(self) -> None:
        """Restart the baseline, since another plan is in use."""
        self._seen = 0
        self._reference: list[float] = []
        self._recent: deque[float] = deque(maxlen=self.lasting_steps)

    @property
    def learning(self) -> bool:
        """Whether the next step belongs to the baseline."""
        return self.settling <= self._seen < self.settling + self.lasting_steps

    @property
    def learnt(self) -> bool:
        """Whether the last step has completed the baseline."""
        return self._seen == self.settling + self.lasting_steps

    @property
    def suspects(self) -> bool:
        """Whether the last step was slower or faster than usual."""
        return bool(self._recent) and self._side([self._recent[-1]]) != 0

    def note(self, seconds: float) -> Drift | None:
        """Record the seconds of a step on the slowest rank; return the change if there is one."""
        if self.learning:
            self._reference.append(seconds)
        elif len(self._reference) == self.lasting_steps:
            self._recent.append(seconds)
        self._seen += 1
        if len(self._recent) < self.lasting_steps or not self._differs():
            return None
        drift = Drift(before_s=median(self._reference), now_s=median(self._recent))
        self.reset()
        return drift

    def _differs(self) -> bool:
        """Tell whether both halves of the last steps, and all of them, deviate in the same direction."""
        times, half = list(self._recent), self.lasting_steps // 2
        sides = {self._side(part) for part in (times[:half], times[half:], times)}
        return len(sides) == 1 and sides != {0}

    def _side(self, times: list[float]) -> int:
        """Return 1: slower, -1: faster, 0: as before. Half of the times are not enough for either."""
        usual_s, limit = median(self._reference), 1 + self.threshold
        return (median_low(times) > limit * usual_s) - (median_high(times) < usual_s / limit)
