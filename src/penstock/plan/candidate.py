"""A choice after evaluation: its plan, its predicted time, a lower bound for any order, and its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.decision import Decision
from penstock.plan.memory import estimate_memory
from penstock.plan.predict import adding_s, bound, closing_s, interval_s, predict_s
from penstock.plan.prices import impossible
from penstock.plan.problem import Problem
from penstock.schedule import StepPlan
from penstock.timing import LowerBound
from penstock.words import within


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An evaluated choice. memory_bytes: estimated, per rank. interval_s: the range in which `predicted_s` is
    expected to lie, from real steps; None = unknown. quick_bound_s: from QuickBounds; 0 = unknown."""

    choice: Decision
    plan: StepPlan
    predicted_s: float
    bound: LowerBound
    memory_bytes: int
    interval_s: tuple[float, float] | None = None
    quick_bound_s: float = 0.0

    @property
    def predicted(self) -> str:
        """The prediction and its interval as text."""
        return within(self.predicted_s, self.interval_s)

    @property
    def bound_s(self) -> float:
        """Seconds that no order of the same tasks beats: the sharper of two bounds.

        They are of tasks' means. Scatter, and what trials have shown, may make the prediction shorter.
        """
        return min(self.predicted_s, max(self.bound.seconds, self.quick_bound_s))


def whole_s(problem: Problem, candidate: Candidate) -> float:
    """Return the predicted seconds of a whole iteration, clipping and updates included: what runs measure.

    Of all its passes, where gradients are accumulated.
    """
    added_s = 0.0
    if problem.passes > 1:
        added_s = min(candidate.predicted_s, adding_s(problem, candidate.choice, candidate.plan))
    return (problem.passes - 1) * added_s + candidate.predicted_s + closing_s(problem)


def evaluate(problem: Problem, choice: Decision) -> Candidate:
    """Order, simulate and bound one choice. Raises ConfigError if a task takes no finite time."""
    plan = problem.plan(choice)
    least = bound(problem, choice, plan)
    predicted_s = max(least.seconds, predict_s(problem, choice, plan))  # scatter may also shorten a step
    if not 0 < predicted_s < math.inf:
        raise impossible(problem, choice, plan, predicted_s)
    return Candidate(
        choice=choice,
        plan=plan,
        predicted_s=predicted_s,
        bound=least,
        memory_bytes=estimate_memory(problem, choice).total_bytes,
        interval_s=interval_s(problem, predicted_s),
    )
