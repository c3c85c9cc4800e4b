"""The most promising plans, each run for some steps: the best prediction is still a prediction.

Where ranks share cores, say, or tasks scatter a lot, a plan of fewer pieces may be faster than it promised.
These steps train like any others. Every rank hears the same times, so all come to the same plan behind the
same step without asking.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from penstock.autopilot.planned import Planned, Rival
from penstock.plan.plan_config import DROPPED_STEPS
from penstock.words import milliseconds

TRIAL_STEPS = DROPPED_STEPS + 4
MOST_SHARE = 0.1
"""Of the steps of a run that may go into trials."""


def worth_while(planned: Planned, steps: int) -> bool:
    """Whether there is something to compare, and a run long enough to gain by it."""
    tried = 1 + len(planned.rivals)
    return tried > 1 and tried * TRIAL_STEPS <= MOST_SHARE * steps


class Trials:
    """Some plans in turns of `TRIAL_STEPS`; the first of them is in use already."""

    def __init__(self, planned: Planned) -> None:
        self._planned = planned
        self._entries = (
            Rival(choice=planned.choice, plan=planned.plan, predicted_s=planned.predicted_s),
            *planned.rivals,
        )
        self._times: list[float] = []
        self._medians: list[float] = []

    @property
    def done(self) -> bool:
        return len(self._medians) == len(self._entries)

    def note(self, slowest_s: float) -> bool:
        """One more step has taken so long on the slowest rank. Whether another plan's turn has come."""
        self._times.append(slowest_s)
        if len(self._times) < TRIAL_STEPS:
            return False
        self._medians.append(median(self._times[DROPPED_STEPS:]))
        self._times.clear()
        return True

    @property
    def turn(self) -> Planned:
        """What to run from the next step on; in the end the fastest, and what was learned of all."""
        entry = self._entries[self._best if self.done else len(self._medians)]
        turn = replace(self._planned, choice=entry.choice, plan=entry.plan, rivals=())
        return replace(turn, misses=self._misses()) if self.done else turn

    def _misses(self) -> dict[str, float]:
        """By schedule, how many times as long a step has taken as it promised to."""
        return {
            entry.choice.schedule: seconds / entry.predicted_s
            for entry, seconds in zip(self._entries, self._medians, strict=True)
        }

    @property
    def line(self) -> str:
        """What came of it, for people."""
        tried = (
            f"{entry.choice.words}: {milliseconds(seconds)} per step "
            f"({milliseconds(entry.predicted_s)} promised)"
            for entry, seconds in zip(self._entries, self._medians, strict=True)
        )
        kept = self._entries[self._best].choice.schedule
        return f"tried for {TRIAL_STEPS} steps each: {'; '.join(tried)}. {kept} is kept"

    @property
    def _best(self) -> int:
        return min(range(len(self._medians)), key=lambda number: self._medians[number])
