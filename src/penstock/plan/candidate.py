"""A choice after evaluation: its plan, its predicted time, a lower bound for any order, and its memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice

from penstock.config import ConfigError
from penstock.decision import Decision
from penstock.graph import Task
from penstock.ops import spec_of
from penstock.plan.memory import MemoryEstimate, estimate_memory, memory_kind
from penstock.plan.predict import adding, adding_s, bound, closing_s, interval_s, predict_s
from penstock.plan.problem import Problem, beside_pieces
from penstock.plan.space import space
from penstock.schedule import StepPlan
from penstock.timing import LowerBound, slowest
from penstock.words import change, gib, milliseconds, within


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An evaluated choice.

    Attributes:
        memory_bytes: The estimated bytes per rank.
        interval_s: The range in which `predicted_s` is expected to lie, from real steps; None = unknown.
        quick_bound_s: The bound from QuickBounds; 0 = unknown.
    """

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

    Where gradients are accumulated, these are the seconds of all its passes.
    """
    added_s = 0.0
    if problem.passes > 1:
        added_s = min(candidate.predicted_s, adding_s(problem, candidate.choice, candidate.plan))
    return (problem.passes - 1) * added_s + candidate.predicted_s + closing_s(problem)


def whole_bound_s(problem: Problem, candidate: Candidate) -> float:
    """Return the seconds of a whole iteration, as in `whole_s`, that no order of the same tasks beats."""
    added_s = 0.0
    if problem.passes > 1:
        least = bound(problem, candidate.choice, candidate.plan, adding(problem))
        added_s = min(candidate.bound_s, least.seconds)
    least_s = (problem.passes - 1) * added_s + candidate.bound_s + closing_s(problem)
    return min(whole_s(problem, candidate), least_s)


def evaluate(problem: Problem, choice: Decision) -> Candidate:
    """Order, simulate and bound one choice.

    Raises:
        ConfigError: If a task takes no finite time.
    """
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


# ---- refusal, by name, of costs that no step can have, before a planner computes with them ----------------


LEAST_STEP_S, LONGEST_STEP_S = 1e-9, 1e9
"""A nanosecond and thirty years: beyond these limits a number of the cluster or the model is a mistake."""

HINT = "Correct the latencies, rates or models of tasks in the cluster file (or section [cluster])."


def check_prices(problem: Problem) -> None:
    """Raise ConfigError for a cluster on which a plain step, or one of its tasks, takes no sensible time."""
    few, times = problem, 1
    if problem.evidence is None:  # otherwise layers of a kind are routed differently
        kinds = Counter(problem.layer_kinds)
        few = problem.only(tuple(map(problem.layer_kinds.index, kinds)))
        times = max(kinds.values())
    for dispatch in problem.dispatches:
        choice = Decision(dispatch=dispatch)
        few_s = sum(_prices(few, choice, few.plan(choice)).values())
        if few_s > LEAST_STEP_S and times * few_s < LONGEST_STEP_S:
            continue  # all layers together take from as long to `times` as long
        plan = problem.plan(choice)
        total_s = sum(_prices(problem, choice, plan).values())
        if not LEAST_STEP_S < total_s < LONGEST_STEP_S:
            raise impossible(problem, choice, plan, total_s)


def impossible(problem: Problem, choice: Decision, plan: StepPlan, seconds: float) -> ConfigError:
    """Return the error for a plan that takes `seconds`; it names the longest task."""
    prices = _prices(problem, choice, plan)
    wrong = [task for task, each in prices.items() if not 0 <= each < LONGEST_STEP_S]
    task = wrong[0] if wrong else max(prices, key=prices.__getitem__)
    why = (
        f"the longest task, {task} ({spec_of(task.op).title}), would take {prices[task]:.3g} s on this "
        f"cluster, and the step with {choice.words} {seconds:.3g} s in total: that is not realistic"
    )
    return ConfigError("cluster", "its costs", why, HINT)


def _prices(problem: Problem, choice: Decision, plan: StepPlan) -> dict[Task, float]:
    cost = problem.cost(choice, plan.shape)
    return {task: slowest(cost(task)) for task in plan.graph.tasks}


# ---- which plans fit into the memory of a rank, and what has to be recomputed for that --------------------


class NothingFitsError(ConfigError):
    """Raised where no plan fits into the memory of a rank."""


@dataclass(frozen=True)
class Room:
    """The memory of a rank for the plans of one problem.

    Attributes:
        memory_bytes: The bytes that a rank may use; None = not known.
    """

    problem: Problem
    memory_bytes: int | None
    _known: dict[Decision, bool] = field(default_factory=dict)
    _kinds: dict[object, bool] = field(default_factory=dict)

    def holds(self, choice: Decision) -> bool:
        """Return whether a plan fits, by the estimate for whole microbatches.

        Replicas of a known routing are planned with the slack of an order. So where experts move, the pieces
        of a microbatch change a little which rank has them, and a search compares an evaluated plan's own
        estimate.
        """
        if self.memory_bytes is None:
            return True
        whole = beside_pieces(self.problem, choice)
        if whole not in self._known:
            kind = memory_kind(self.problem, whole)
            if kind not in self._kinds:
                self._kinds[kind] = estimate_memory(self.problem, whole).total_bytes <= self.memory_bytes
            self._known[whole] = self._kinds[kind]
        return self._known[whole]

    def with_least_recompute(self, choice: Decision) -> Decision | None:
        """Return the choice with the least recomputation that fits; None if nothing does."""
        tried = (replace(choice, recompute=what) for what in self.problem.recompute)
        return next((each for each in tried if self.holds(each)), None)

    @property
    def first_held(self) -> list[Decision]:
        """The first choice of all that fits, where any does."""
        if not any(map(self.holds, space(self.problem, "memory"))):
            return []
        return list(islice(filter(self.holds, space(self.problem)), 1))

    @property
    def needed(self) -> Problem:
        """The problem with recomputation left open where some plan does not fit without it. Otherwise nothing
        is recomputed, since that takes time."""
        if len(self.problem.recompute) == 1:
            return self.problem
        least = replace(self.problem, recompute=self.problem.recompute[:1])
        enough = self.memory_bytes is None or all(map(self.holds, space(least, "memory")))
        return least if enough else self.problem


def least_memory(problem: Problem) -> MemoryEstimate:
    """Return the memory of the plan that needs least."""
    whole = dict.fromkeys(beside_pieces(problem, choice) for choice in space(problem, "memory"))
    kinds = {memory_kind(problem, choice): choice for choice in whole}
    estimates = (estimate_memory(problem, choice) for choice in kinds.values())
    return min(estimates, key=lambda estimate: estimate.total_bytes)


def recompute_words(problem: Problem, best: Candidate) -> str:
    """Return the memory that recomputation saves and the time that it takes, against the same plan without
    it, ordered in the same way; "" where nothing is recomputed."""
    if best.choice.recompute == "none":
        return ""
    once = evaluate(problem, replace(best.choice, recompute="none"))
    longer_s = best.predicted_s - once.predicted_s
    longer = f"takes {milliseconds(longer_s)} ({change(best.predicted_s, once.predicted_s)})"
    took = longer if longer_s > 0 else "takes no time: it runs under transfers"
    return (
        f"; recomputing {best.choice.recompute} saves {gib(once.memory_bytes - best.memory_bytes)} and {took}"
    )
