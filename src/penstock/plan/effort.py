"""The extent of a search, counted in work, not in time: a busy machine finds what an idle one does.

A caller sets a limit on the time, too, which only a very busy machine or a very large step reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from penstock.config import Checked, ConfigError, Items, Within
from penstock.decision import Decision
from penstock.plan.predict import timelines
from penstock.plan.problem import Problem
from penstock.schedule.penstock import trials
from penstock.words import counted

Effort = Literal["low", "quick", "usual"]

PLACEMENTS = {"low": 30_000, "quick": 30_000, "usual": 200_000}
"""Task placements in a budget of 1: one per task when its cut is ordered, and one on each timeline."""

PER_PLANNER = 5_000
"""The placements charged for a published planner's own formulas and simulations."""

QUICK = 15
"""A local search is charged one placement per QUICK tasks: they are plain numbers, rarely all of them."""

MOST_BUDGET = 1000.0

Count = Annotated[int, Within(0, 2**62, "no search looks at more")]


@dataclass(frozen=True, kw_only=True)
class Searched(Checked):
    """What a search examined and what it left out. Counts of choices, except for placements.

    Attributes:
        left_out: Choices neither simulated nor ruled out by a lower bound.
        placements, allowed: Tasks placed on simulated timelines, and the number that the budget allowed.
        stopped: The stage in which the budget was used up; None = it was not.
        budget: How many times as much as usual was allowed.
        late: Whether the time limit of the search ended it, and not the budget.
        skipped: Published planners whose plans were not compared.
        impossible: Why a schedule was left out that cannot cut this step, with its name.
    """

    simulated: Count
    ruled_out: Count
    left_out: Count
    placements: Count
    allowed: Count
    budget: Annotated[float, Within(0, MOST_BUDGET, "no search had a larger one")]
    stopped: str | None = None
    late: bool = False
    skipped: Annotated[tuple[str, ...], Items(64, "there are no more published planners")] = ()
    impossible: Annotated[tuple[str, ...], Items(1000, "one per schedule")] = ()

    @property
    def complete(self) -> bool:
        """Whether every choice was simulated or ruled out, and no stage was cut short."""
        return self.stopped is None and not self.left_out

    @property
    def words(self) -> str:
        """A description of the search that claims no more than was done."""
        looked = f"{counted(self.simulated, 'plan')} simulated, {self.ruled_out:,} ruled out by lower bounds"
        looked += "".join(f"; left out: schedule {each}" for each in self.impossible)
        if self.stopped is None:
            return looked if not self.left_out else f"{looked}, {self.left_out:,} not examined"
        left_out = [f"{self.left_out:,} plan{'s' if self.left_out > 1 else ''}"] if self.left_out else []
        if self.skipped:
            left_out += [f"the choices of these planners: {', '.join(self.skipped)}"]
        examined = f"Not examined: {' and '.join(left_out)}. " if left_out else ""
        if self.late:
            return (
                f"{looked}. {examined}The search was ended in stage '{self.stopped}': it was stopped, or "
                "took too long, as this machine is busy or the step is large"
            )
        return (
            f"{looked}. {examined}The budget of {self.budget:g} ({self.allowed:,} simulated tasks) was used "
            f"up in stage '{self.stopped}'; a larger one may find a better plan (--budget; in a run "
            f"plan.budget)"
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """One more line of explanation if some choices were not examined, else none."""
        return () if self.complete and not self.impossible else (f"Search   {self.words}",)


SEARCH_S = 120.0
"""Seconds for a search, or for a comparison of layouts, with the usual budget: several times what either
takes on a machine that is not busy. A larger budget has as many times more."""

COMMAND_S = 30.0
"""Seconds of processor time for all that `penstock plan` searches, with the usual budget: several times what
it takes. A busy machine finds the same plan as an idle one; a slow machine, or a very large step, ends."""


def time_limit(
    clock: Callable[[], float], budget: float = 1.0, most_s: float = SEARCH_S
) -> Callable[[], bool]:
    """Return a function that tells whether the time is over for a search that begins now.

    Args:
        clock: Returns the time in seconds.
        budget: The budget of the search.
        most_s: The limit in seconds for the usual budget; a larger budget has as many times more.
    """
    until_s = clock() + most_s * max(1.0, budget)
    return lambda: clock() > until_s


class OutOfBudgetError(Exception):
    """Raised where the next simulation would begin once the budget is used up."""


class Meter:
    """Counter of placed tasks against an allowance.

    Args:
        effort: What a budget of 1 is.
        budget: How many times as much is allowed, in placed tasks.
        ends: Tells whether the time is over.
    """

    def __init__(self, effort: Effort, budget: float, ends: Callable[[], bool] = lambda: False) -> None:
        check_budget("budget", budget)
        self.allowed, self.spent = int(budget * PLACEMENTS[effort]), 0
        self._ends, self._late = ends, False

    @property
    def late(self) -> bool:
        """Whether the time is over; it stays over."""
        self._late = self._late or self._ends()
        return self._late

    @property
    def used_up(self) -> bool:
        return self.spent >= self.allowed or self.late

    def check(self) -> None:
        """Raise OutOfBudgetError if nothing is left of the allowance."""
        if self.used_up:
            raise OutOfBudgetError

    def note(self, problem: Problem, choice: Decision, tasks: int) -> None:
        """Count a choice that was ordered and simulated.

        Args:
            tasks: The number of tasks in its graph.
        """
        self.spent += tasks * (1 + timelines(problem))
        if choice.reads("priority") and choice.priority == "search":
            self.spent += tasks * trials(tasks) // QUICK

    def note_round(self, problem: Problem, tasks: int, part: int) -> None:
        """Count 1/part of a full search for an order, and the simulation of the order found.

        Args:
            tasks: The number of tasks in the graph.
            part: How many times shorter the search was than a full one.
        """
        self.spent += tasks * (timelines(problem) + trials(tasks) // part // QUICK)

    def note_planner(self) -> None:
        """Count the choice of one published planner."""
        self.spent += PER_PLANNER


def check_budget(key: str, budget: float) -> None:
    """Raise ConfigError if `budget` is out of range."""
    if not 0 < budget <= MOST_BUDGET or math.isnan(budget):
        why = f"must be above 0 and at most {MOST_BUDGET:g}: it multiplies the usual search effort"
        raise ConfigError(key, budget, why, "Use 1, or 4 to search four times as long.")
