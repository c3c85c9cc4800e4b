"""Quick bounds of cuts against the bounds of their graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import ClusterConfig
from penstock.decision import Decision
from penstock.plan import Problem, evaluate, find_plan
from penstock.plan.bound import QuickBounds
from penstock.plan.space import space
from penstock.step.shape import TokenLayout
from tests.plan.problems import Shared, problem, problems, shared, with_sharing
from tests.support.draws import draws


@draws(30)
@given(problems(layers=3), st.randoms(use_true_random=False))
def test_no_order_beats_a_quick_bound_and_it_is_not_below_the_busiest_lane(each: Problem, rng: Any) -> None:
    choices = list(space(each))
    bounds = QuickBounds(each)
    for choice in rng.sample(choices, min(4, len(choices))):
        found = evaluate(each, choice)
        quick_s = bounds.seconds(choice)
        assert quick_s <= found.predicted_s * (1 + 1e-9)
        assert quick_s >= found.bound.busiest_lane_s * (1 - 1e-9), "work is not estimated: layers add up"


@draws(30)
@given(problems(layers=3), shared(), st.randoms(use_true_random=False))
def test_the_same_where_ranks_share_attention_and_experts(each: Problem, sharing: Shared, rng: Any) -> None:
    each = sharing(each)
    choices = list(space(each))
    bounds = QuickBounds(each)
    for choice in rng.sample(choices, min(4, len(choices))):
        found = evaluate(each, choice)
        quick_s = bounds.seconds(choice)
        assert found.bound.busiest_lane_s * (1 - 1e-9) <= quick_s <= found.predicted_s * (1 + 1e-9)


@draws(30)
@given(
    problems(layers=3),
    st.lists(st.floats(1, 4), min_size=8, max_size=8),
    st.floats(1, 4),
    st.randoms(use_true_random=False),
)
def test_no_bound_is_above_a_step_of_ranks_of_which_some_are_slow_and_others_busy(
    each: Problem, slowness: list[float], ratio: float, rng: Any
) -> None:
    """The slow ones are not the busy ones: no rank has all of the slowest tasks."""
    each = replace(each, slowness=tuple(slowness[: each.workload.world_size])).with_imbalance(ratio)
    choices = list(space(each))
    bounds = QuickBounds(each)
    for choice in rng.sample(choices, min(4, len(choices))):
        found = evaluate(each, choice)
        simulated_s = each.simulate(choice, found.plan).iteration_s
        assert found.bound.seconds <= simulated_s * (1 + 1e-9)
        assert bounds.seconds(choice) <= simulated_s * (1 + 1e-9)


def test_a_slow_rank_beside_a_busy_one_does_not_rule_out_what_is_faster() -> None:
    """Every cut of one schedule, simulated: none is faster than the plan that was found."""
    each = replace(problem(batch=4), slowness=(1.0, 1.0, 1.0, 3.0)).with_imbalance(3.5)
    found = find_plan(each)
    cuts = [choice for choice in space(each) if choice.schedule == "flowmoe"]
    assert cuts and found.best.predicted_s <= min(evaluate(each, choice).predicted_s for choice in cuts)
    assert found.lower_bound_s <= found.best.bound_s <= found.best.predicted_s


@pytest.mark.parametrize("tokens", ["split", "replicated"])
def test_reductions_wait_for_gradients_and_not_for_what_follows_them(tokens: TokenLayout) -> None:
    """Attention has added its gradients before its tokens are summed inside the node: that may overlap."""
    slow = ClusterConfig(
        flops_per_s=1e11,
        memory_bytes_per_s=1e9,
        link_latency_s=1e-3,
        link_bytes_per_s=1e7,
        intra_bytes_per_s=1e9,
        task_overhead_s=1e-6,
    )
    dense = problem((False, False), batch=1, cluster=slow, all_reduce_bytes=0)
    each = with_sharing(dense, 4, 2, tokens)
    for schedule in ("dense_overlap", "penstock", "flowmoe"):
        choice = Decision(schedule=schedule)
        assert QuickBounds(each).seconds(choice) <= evaluate(each, choice).predicted_s


def test_one_chain_binds_where_nothing_is_cut() -> None:
    each = problem((True, False, True))
    choice = Decision()
    exact = each.bound(choice, each.plan(choice))
    assert exact.critical_path_s > exact.busiest_lane_s
    assert QuickBounds(each).seconds(choice) == pytest.approx(exact.seconds)


def test_the_slowest_rank_counts() -> None:
    even, uneven = problem(), problem(slowness=(1.0, 3.0, 1.0, 1.0))
    choice = Decision(schedule="flowmoe", microbatches=2)
    assert QuickBounds(even).seconds(choice) < QuickBounds(uneven).seconds(choice)
    assert QuickBounds(uneven).seconds(choice) <= evaluate(uneven, choice).predicted_s


def test_layers_with_other_gradients_are_told_apart() -> None:
    each = problem()
    work = replace(each.workload, all_reduce_bytes=(1 << 18, 1 << 24))
    other = replace(each, workload=work)
    choice = Decision(schedule="flowmoe", microbatches=2, all_reduce_chunk_bytes=1 << 20)
    exact = other.bound(choice, other.plan(choice))
    assert exact.busiest_lane == "inter"
    simulated_s = evaluate(other, choice).predicted_s
    assert exact.seconds < QuickBounds(other).seconds(choice) < simulated_s
