"""Runs a plan that moves and the one before it in turns: steps decide between them where there are enough.

The cost of guests during computation is hard to predict, above all on a machine where ranks share cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from penstock.autotune.lessons import Run, forgotten, learned
from penstock.autotune.planned import Planned
from penstock.autotune.trials import MOST_SHARE, TRIAL_STEPS, TRIALS_S, Records, turn_ends
from penstock.cost.placed import Evidence
from penstock.plan.plan_config import DROPPED_STEPS
from penstock.plan.plan_file import MOST_OTHERS, OtherPlan
from penstock.topology import Control
from penstock.train.config import RunConfig
from penstock.words import milliseconds


def worth_trying(config: RunConfig) -> bool:
    """Tell whether a run has trials, and is long enough to gain from the faster of two plans."""
    return config.plan.trials > 1 and MOST_SHARE * config.train.steps >= 2 * TRIAL_STEPS


class TriedMoves:
    """Runs two plans in turns of `TRIAL_STEPS`: `new`, which is in use already, then `before`.

    Both are ordered by measured durations, where schedules are. A turn that takes longer than its half of
    `TRIALS_S` ends as soon as one step counts.
    """

    settles: Final = False

    def __init__(self, before: Planned, new: Planned) -> None:
        self._plans = (new, replace(before, plans=new.plans, lines=new.lines))
        self._times: tuple[list[float], list[float]] = ([], [])
        self._records: tuple[list[Records], list[Records]] = ([], [])
        self._turn = 0

    @property
    def done(self) -> bool:
        return self._turn == len(self._plans)

    def note(self, slowest_s: float, records: Records) -> bool:
        """Record a step: its seconds on the slowest rank, its tasks here. Return whether a turn has ended."""
        times_s = self._times[self._turn]
        times_s.append(slowest_s)
        self._records[self._turn].append(records)
        ends = turn_ends(times_s, late=sum(times_s) > TRIALS_S / len(self._plans))
        self._turn += ends
        return ends

    @property
    def turn(self) -> Planned:
        """Plan to run from the next step on; after both turns the faster one, with the times of both."""
        if not self.done:
            return self._plans[1]
        (kept_s, kept), (left_s, left) = self._ranked
        trial = OtherPlan(words=kept.choice.words, predicted_s=kept.predicted_s, measured_s=kept_s)
        tried = OtherPlan(words=left.choice.words, predicted_s=self._like(kept, left), measured_s=left_s)
        others = [each for each in kept.others if each.words not in (tried.words, trial.words)]
        return replace(kept, trial=trial, others=(tried, *others)[:MOST_OTHERS])

    @property
    def lines(self) -> tuple[str, ...]:
        """Times of both plans, and which plan is kept."""
        times = ", ".join(
            f"{milliseconds(seconds)} by {plan.name}"
            for plan, seconds in zip(self._plans, self._medians, strict=True)
        )
        kept = self._ranked[0][1]
        way = "keeping" if kept is self._plans[0] else "going back to"
        first, second = map(len, self._times)
        steps = f"{first} steps each" if first == second else f"{first} and {second} steps"
        return (f"tried for {steps}: a step takes {times}: {way} {kept.name}",)

    @property
    def said(self) -> str:
        """The same, for the screen."""
        return self.lines[0]

    def learned(self, planned: Planned, control: Control) -> Planned:
        """Return the plan that is kept with what the trial tells of the other; all ranks call it together.

        Moving that won is not remembered: nothing would be tried again, and a lucky turn would speak for it.
        """
        slower, faster = (self._run(each) for _, each in reversed(self._ranked))
        choice = slower.planned.choice
        if planned.choice == self._plans[0].choice and choice.samples == choice.experts == "none":
            return forgotten(planned, slower.planned, faster.planned)
        return learned(planned, slower, faster, control)

    def _run(self, planned: Planned) -> Run:
        """Return a plan's turn, priced by the routing that was observed, whatever the plan moves."""
        turn = self._plans.index(planned)
        steps = self._records[turn][DROPPED_STEPS:]
        problem = replace(planned.problem, evidence=self._evidence)
        return Run(
            planned=replace(planned, problem=problem),
            seconds=self._medians[turn],
            records=[record for step in steps for record in step],
        )

    @property
    def _evidence(self) -> Evidence | None:
        return self._plans[0].problem.observed

    def _like(self, kept: Planned, left: Planned) -> float:
        """Return the seconds predicted for `left` by the routing from which `kept` is predicted."""
        alike = [
            replace(each, problem=replace(each.problem, evidence=self._evidence)).predicted_s
            for each in (kept, left)
        ]
        return kept.predicted_s * alike[1] / alike[0]

    @property
    def _ranked(self) -> Sequence[tuple[float, Planned]]:
        """Both plans with the seconds that their steps took, the faster one first."""
        return sorted(zip(self._medians, self._plans, strict=True), key=lambda each: each[0])

    @property
    def _medians(self) -> Sequence[float]:
        return [median(turn[DROPPED_STEPS:]) for turn in self._times]
