"""Short searches before full ones: which cut is ordered in full."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.cost import ClusterConfig
from penstock.decision import Decision
from penstock.plan import Candidate, Problem, evaluate, find_plan
from penstock.plan.effort import Meter, OutOfBudgetError
from penstock.plan.space import space
from penstock.plan.successive_halving import SuccessiveHalving
from tests.plan.problems import problem

MISLEADING = 5
"""Of the random problems one whose best cut by rules is not the best once orders are searched for."""


def random_problem(seed: int) -> Problem:
    """Two to four layers on four ranks of two nodes, with devices and links of very different speeds."""
    rng = random.Random(seed)
    layers = rng.choice([2, 3, 3, 4])

    def rate(low: float, high: float) -> float:
        return float(10 ** rng.uniform(low, high))

    cluster = ClusterConfig(
        flops_per_s=rate(9.7, 10.7),
        link_bytes_per_s=rate(7.7, 8.7),
        task_overhead_s=rate(-5, -4),
        link_latency_s=rate(-5, -3.7),
    )
    size = rng.choice([1 << 18, 1 << 20])
    moe_layers = (True, *(rng.random() < 0.8 for _ in range(layers - 1)))
    dispatches = rng.choice([("flat",), ("flat", "hierarchical_2d")])
    return problem(moe_layers, cluster=cluster, all_reduce_bytes=size, dispatches=dispatches)


@pytest.fixture(scope="module")
def each() -> Problem:
    return random_problem(MISLEADING)


@pytest.fixture(scope="module")
def ruled(each: Problem) -> dict[Decision, Candidate]:
    """Cuts with few chunks, ordered by rules."""
    few = [choice for choice in space(each) if choice.schedule == "penstock" and max(choice.degrees) <= 2]
    return {choice: evaluate(each, choice) for choice in few}


def searched(choice: Decision) -> Decision:
    return replace(choice, priority="search")


@pytest.mark.soak
def test_the_best_cut_by_rules_is_the_wrong_one(each: Problem, ruled: dict[Decision, Candidate]) -> None:
    """Another one is over a percent faster when both are ordered in full, and short searches find it."""
    by_rule = searched(min(ruled, key=lambda choice: ruled[choice].predicted_s))
    by_draft = SuccessiveHalving(each, Meter("usual", 1.0)).ranked(ruled)[0]
    first_s, drafted_s = (evaluate(each, choice).predicted_s for choice in (by_rule, by_draft))
    assert drafted_s < 0.99 * first_s


@pytest.mark.slow
def test_a_plan_is_no_worse_than_the_best_cut_by_drafts(
    each: Problem, ruled: dict[Decision, Candidate]
) -> None:
    best = SuccessiveHalving(each, Meter("usual", 1.0)).ranked(ruled)[0]
    assert find_plan(each).best.predicted_s <= evaluate(each, best).predicted_s


def test_what_no_order_makes_the_best_gets_no_search(each: Problem, ruled: dict[Decision, Candidate]) -> None:
    best_s = min(found.bound.seconds for found in ruled.values()) * 1.001
    known = {
        choice: replace(found, predicted_s=max(best_s, found.bound.seconds))
        for choice, found in ruled.items()
    }
    left = {searched(choice) for choice, found in ruled.items() if found.bound.seconds < best_s}
    drafts = SuccessiveHalving(each, Meter("usual", 1.0))
    assert set(drafts.ranked(known)) == set(drafts.seconds) == left


def test_a_draft_is_charged_once_and_needs_a_budget(each: Problem, ruled: dict[Decision, Candidate]) -> None:
    two = dict(list(ruled.items())[:2])
    meter = Meter("usual", 1.0)
    drafts = SuccessiveHalving(each, meter)
    assert drafts.ranked(two) and (spent := meter.spent) > 0
    assert drafts.ranked(two) and meter.spent == spent
    with pytest.raises(OutOfBudgetError):
        SuccessiveHalving(each, Meter("usual", 1e-6)).ranked(two)
