"""Refusal, by name, of costs that no step can have, before a planner computes with them."""

from __future__ import annotations

from collections import Counter

from penstock.config import ConfigError
from penstock.decision import Decision
from penstock.graph import Task
from penstock.ops import spec_of
from penstock.plan.problem import Problem
from penstock.schedule import StepPlan
from penstock.timing import slowest

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
