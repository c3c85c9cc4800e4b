"""Predictions on measured clusters: contention that slows tasks down, and ranks that scatter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from penstock.cost import ClusterConfig, ProfiledCluster
from penstock.cost.cluster_file import StepFit, TaskModel
from penstock.decision import Decision
from penstock.plan import Problem, evaluate, explain, find_plan, predict_s
from penstock.plan.bound import QuickBounds
from penstock.plan.predict import alone
from penstock.words import within
from tests.plan.problems import FILE, problem, problems
from tests.support.draws import draws

SEQUENTIAL = Decision()
FLOWMOE = Decision(schedule="flowmoe", microbatches=2)


def profiled(
    *, contended: float = 1.0, transfers: float = 1.0, jitter: float = 0.0, alpha_s: float = 2e-4
) -> Problem:
    """Every compute task is `contended` times longer beside traffic, traffic `transfers` times beside
    tasks."""
    ops = ("EM.F", "EM.B", "AT.F", "AT.B", "X.F", "X.B", "U.F", "U.B", "HD.F", "HD.B")
    tasks = tuple(
        TaskModel(op=op, phase=phase, alpha_s=alpha_s, scale=1.0, contended=contended)
        for op, phase in (each.split(".") for each in ops)
    )
    file = replace(FILE, tasks=tasks, contended_transfers=transfers, jitter=jitter)
    return problem(cluster=ProfiledCluster.build(file))


def seconds(each: Problem, choice: Decision) -> float:
    return predict_s(each, choice, each.plan(choice))


@draws(10)
@given(problems())
def test_without_a_profile_the_prediction_is_the_simulation(each: Problem) -> None:
    plan = each.plan(SEQUENTIAL)
    assert predict_s(each, SEQUENTIAL, plan) == each.simulate(SEQUENTIAL, plan).iteration_s


@pytest.mark.slow
def test_no_plan_is_said_to_take_less_than_the_one_that_was_found_will() -> None:
    """Bounds are of tasks' means, and what is drawn for a prediction may be shorter."""
    each = replace(profiled(jitter=0.1, alpha_s=1e-2), slowness=(1.0, 1.0, 1.0, 100.0))
    found = find_plan(each, budget=0.02)
    assert QuickBounds(each).seconds(found.best.choice) > found.best.predicted_s
    assert found.lower_bound_s <= found.best.predicted_s


def test_where_nothing_overlaps_nobody_has_company() -> None:
    quiet, crowded = profiled(), profiled(contended=3.0, transfers=2.0)
    assert seconds(crowded, SEQUENTIAL) == pytest.approx(seconds(quiet, SEQUENTIAL))


def test_partial_company_lies_between_none_and_full() -> None:
    quiet, crowded = profiled(), profiled(contended=1.6, transfers=1.3)
    plan = crowded.plan(FLOWMOE)
    none_s = alone(crowded).simulate(FLOWMOE, plan).iteration_s
    full_s = crowded.simulate(FLOWMOE, plan).iteration_s
    assert none_s < predict_s(crowded, FLOWMOE, plan) < full_s
    assert seconds(quiet, FLOWMOE) == pytest.approx(predict_s(quiet, FLOWMOE, quiet.plan(FLOWMOE)))


def test_scattered_tasks_take_longer_together_than_on_average() -> None:
    calm_s, scattered_s, wild_s = (seconds(profiled(jitter=j), FLOWMOE) for j in (0.0, 0.1, 0.3))
    assert calm_s < scattered_s < wild_s
    assert seconds(profiled(jitter=0.3), FLOWMOE) == wild_s, "what is drawn has a fixed seed"


def corrected(each: Problem, ratio: float) -> Problem:
    """The same where steps took `ratio` times as long as their simulation, give or take a fifth."""
    assert isinstance(each.cluster, ProfiledCluster)
    steps = StepFit(ratio=ratio, low=0.8 * ratio, high=1.2 * ratio)
    return replace(each, cluster=ProfiledCluster.build(replace(each.cluster.file, steps=steps)))


@pytest.mark.slow
def test_real_steps_correct_the_prediction_and_give_it_an_interval() -> None:
    """And lower bounds with it, which a prediction is compared with: the same plan is the best."""
    ratio = 0.6
    each = profiled(contended=1.6, jitter=0.1)
    usual, found = evaluate(each, FLOWMOE), evaluate(corrected(each, ratio), FLOWMOE)
    assert usual.interval_s is None and "(" not in usual.predicted
    assert found.predicted_s == pytest.approx(ratio * usual.predicted_s)
    assert found.interval_s == pytest.approx((0.8 * found.predicted_s, 1.2 * found.predicted_s))
    assert found.predicted == within(found.predicted_s, found.interval_s)
    assert found.bound.seconds == pytest.approx(ratio * usual.bound.seconds)
    problems = each, corrected(each, ratio)
    plain_s, quick_s = (QuickBounds(x).seconds(FLOWMOE) for x in problems)
    assert quick_s == pytest.approx(ratio * plain_s)
    plain, best = (find_plan(x, budget=0.01, effort="low") for x in problems)
    assert best.best.choice == plain.best.choice and best.searched == plain.searched
    told, retold = (explain(x, found).busy for x, found in zip(problems, (plain, best), strict=True))
    assert retold == pytest.approx(told)


def test_an_interval_is_told_in_the_unit_of_its_prediction() -> None:
    assert within(0.812, (0.78, 0.845)) == "812.0 ms (780.0 to 845.0)"
    assert within(0.812, None) == within(0.812, (0.81199, 0.81201)) == "812.0 ms"


def test_a_slower_rank_holds_up_all() -> None:
    cluster = ProfiledCluster.build(replace(FILE, rates=ClusterConfig(flops_per_s=2e10)))
    even, uneven = (problem(cluster=cluster, slowness=s) for s in ((), (1.0, 1.0, 2.0, 1.0)))
    assert seconds(uneven, FLOWMOE) > 1.2 * seconds(even, FLOWMOE)


def test_it_does_not_matter_which_rank_is_slower() -> None:
    """Company is not read off one rank: the slow one has other contention than those that wait for it."""
    crowded = profiled(contended=1.6, transfers=1.3)
    alike, first, third = (
        seconds(replace(crowded, slowness=slowness), FLOWMOE)
        for slowness in ((1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 1.0), (1.0, 1.0, 2.0, 1.0))
    )
    assert alike == pytest.approx(seconds(crowded, FLOWMOE))
    assert first == pytest.approx(third) and first > 1.1 * alike
