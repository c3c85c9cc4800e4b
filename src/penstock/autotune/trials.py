"""Runs the most promising plans for some steps each: the best prediction is still a prediction.

Where ranks share cores, for example, or task durations vary a lot, a plan of fewer pieces may be faster than
predicted. These steps train like any others. Every rank receives the same times, so all ranks choose the same
plan after the same step without communicating.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from penstock.autotune.planned import Planned, Rival
from penstock.plan.plan_config import DROPPED_STEPS
from penstock.plan.plan_file import OtherPlan
from penstock.plan.predict import interval_s
from penstock.topology import Control
from penstock.trace import TaskRecord
from penstock.words import counted, milliseconds, within

Records = Sequence[TaskRecord]

TRIAL_STEPS = DROPPED_STEPS + 4
TRIALS_S = 1800.0
"""Seconds of all steps of a comparison, after which no other plan is tried."""
MOST_SHARE = 0.1
"""The largest share of a run's steps that trials may take."""


def turn_ends(times_s: Sequence[float], *, late: bool) -> bool:
    """Tell whether a turn has enough steps; where the time is over, one step that counts is enough."""
    return len(times_s) >= (DROPPED_STEPS + 1 if late else TRIAL_STEPS)


def worth_while(planned: Planned, steps: int) -> bool:
    """Tell whether there are plans to compare, in a run that is long enough to gain from the fastest."""
    tried = 1 + len(planned.rivals)
    return tried > 1 and tried * TRIAL_STEPS <= MOST_SHARE * steps


class Trials:
    """Runs some plans in turns of `TRIAL_STEPS`; the first of them is in use already.

    After `TRIALS_S` the turn that is running ends as soon as it can, and is the last. That time is the sum of
    what all ranks know of steps, so all ranks end after the same one.
    """

    settles: Final = True
    """Whether the plan that is kept is still to be ordered by measured durations."""

    def __init__(self, planned: Planned) -> None:
        self._planned = planned
        self._entries = (
            Rival(choice=planned.choice, plan=planned.plan, predicted_s=planned.predicted_s),
            *planned.rivals,
        )
        self._times: list[float] = []
        self._medians: list[float] = []
        self._spent_s = 0.0

    @property
    def done(self) -> bool:
        return len(self._medians) == len(self._entries) or (bool(self._medians) and self._late)

    @property
    def _late(self) -> bool:
        return self._spent_s > TRIALS_S

    def note(self, slowest_s: float, records: Records) -> bool:
        """Record the seconds of a step on the slowest rank; return whether the next plan's turn has come."""
        del records  # whole steps decide
        self._times.append(slowest_s)
        self._spent_s += slowest_s
        if not turn_ends(self._times, late=self._late):
            return False
        self._medians.append(median(self._times[DROPPED_STEPS:]))
        self._times.clear()
        return True

    def learned(self, planned: Planned, control: Control) -> Planned:
        """Return the plan that is kept: it has the misses of all already."""
        del control
        return planned

    @property
    def turn(self) -> Planned:
        """Plan to run from the next step on; after all trials the fastest plan, with the misses of all."""
        place = self._best if self.done else len(self._medians)
        entry, number = self._entries[place], self._planned.number + place
        turn = replace(self._planned, choice=entry.choice, plan=entry.plan, rivals=())
        turn = replace(turn, number=number, plans=self._planned.plans + len(self._entries) - 1)
        if not self.done:
            return turn
        tried = {each.words: each for each in self._tried}
        trial = tried.pop(entry.choice.words)
        rest = (each for each in self._planned.others if each.words not in (*tried, trial.words))
        return replace(turn, misses=self._misses(), trial=trial, others=(*tried.values(), *rest))

    @property
    def _tried(self) -> list[OtherPlan]:
        """All plans that were tried, with the seconds that their steps took."""
        return [
            OtherPlan(words=entry.choice.words, predicted_s=entry.predicted_s, measured_s=seconds)
            for entry, seconds in zip(self._entries, self._medians, strict=False)
        ]

    def _misses(self) -> dict[str, float]:
        """Return measured over predicted seconds per step, by schedule."""
        return {
            entry.choice.schedule: seconds / entry.predicted_s
            for entry, seconds in zip(self._entries, self._medians, strict=False)
        }

    @property
    def lines(self) -> tuple[str, ...]:
        """Table of the plans with predicted and measured times, and which plan is kept."""
        first, problem = self._planned.number, self._planned.problem
        predicted = [
            within(entry.predicted_s, interval_s(problem, entry.predicted_s)) for entry in self._entries
        ]
        width = max(9, *map(len, predicted))
        tried = zip(self._entries, predicted, self._medians, strict=False)
        rows = (
            f"  {number:>4}  {text:>{width}}  {milliseconds(seconds):>9}  {entry.choice.words}"
            for number, (entry, text, seconds) in enumerate(tried, first)
        )
        most = "at most " if self._late else ""
        return (
            f"trials of {most}{TRIAL_STEPS} steps each, time per whole step (update included):",
            f"  plan  {'predicted':>{width}}  {'measured':>9}",
            *rows,
            f"keeping plan {first + self._best}{self._untried}",
        )

    @property
    def said(self) -> str:
        """The same in a sentence, for the screen."""
        first = self._planned.number
        times = ", ".join(
            f"{milliseconds(seconds)} by plan {number}" for number, seconds in enumerate(self._medians, first)
        )
        most = "at most " if self._late else ""
        kept = f"plan {first + self._best}"
        if self._best:  # the first one was said when it was chosen
            kept += f": {self._entries[self._best].choice.words}"
        return (
            f"tried for {most}{TRIAL_STEPS} steps each: a step takes {times}: keeping {kept}{self._untried}"
        )

    @property
    def _untried(self) -> str:
        left = len(self._entries) - len(self._medians)
        return f"; {counted(left, 'plan')} not tried: these steps took {self._spent_s:.0f} s" if left else ""

    @property
    def _best(self) -> int:
        return min(range(len(self._medians)), key=lambda number: self._medians[number])
