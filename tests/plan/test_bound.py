"""Quick bounds of cuts against the bounds of their graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Table
from penstock.cost import ClusterConfig
from penstock.decision import Decision, Field, Movable, register, unregister
from penstock.plan import Problem, evaluate, find_plan
from penstock.plan.bound import QuickBounds
from penstock.plan.space import space
from penstock.step.passes import GatheredLoads
from penstock.step.rewrite import Pass
from penstock.step.shape import TokenLayout
from tests.plan.problems import every_kind, problem, problems, with_sharing
from tests.support.draws import draws


@pytest.mark.slow
@draws(60)
@given(every_kind(), st.randoms(use_true_random=False))
def test_no_order_beats_a_quick_bound_and_it_is_not_below_the_busiest_lane(each: Problem, rng: Any) -> None:
    choices = list(space(each))
    bounds = QuickBounds(each)
    for choice in rng.sample(choices, min(4, len(choices))):
        plan = each.plan(choice)
        quick_s, busiest_s = bounds.seconds(choice), each.bound(choice, plan).busiest_lane_s
        assert quick_s <= each.simulate(choice, plan).iteration_s * (1 + 1e-9)
        assert quick_s >= busiest_s * (1 - 1e-9), "work is not estimated: layers add up"


LATE = ClusterConfig(flops_per_s=1e12, link_bytes_per_s=1e10, link_latency_s=1e-3, task_overhead_s=1e-6)


@pytest.mark.parametrize(
    "what",
    [
        {"gathers_loads": True},
        {"moving": Movable(experts=("planned",))},
        {"moving": Movable(experts=("planned",), replica_slots=(3,))},
        {"moving": Movable(samples=("netmoe",), experts=("planned",))},
    ],
)
@pytest.mark.parametrize("layers", [(True,) * 6, (False, True, True, False), (True, True)])
def test_what_a_step_does_once_or_in_all_layers_at_a_time_is_counted_so(
    what: dict[str, Any], layers: tuple[bool, ...]
) -> None:
    """Loads are gathered once, and replicas may travel for all layers before the first attention ends."""
    each = problem(layers, batch=1, cluster=LATE, all_reduce_bytes=0)
    shape = replace(each.shape, gathers_loads=what.get("gathers_loads", False))
    each = replace(each, shape=shape, movable=what.get("moving", each.movable))
    bounds = QuickBounds(each)
    for choice in space(each):
        if choice.schedule in ("sequential", "penstock") and choice.degrees == (1, 1):
            exact = evaluate(each, choice)
            assert exact.bound.busiest_lane_s * (1 - 1e-9) <= bounds.seconds(choice)
            assert bounds.seconds(choice) <= exact.predicted_s * (1 + 1e-9), choice.words


def test_replicas_in_more_pieces_have_a_bound_of_their_own() -> None:
    """Every piece of a replica has a start-up: what was known of few pieces is not the bound of many."""
    each = problem(cluster=LATE)
    few, many = (
        Decision(schedule="flowmoe", experts="planned", all_reduce_chunk_bytes=size)
        for size in (1 << 20, 4096)
    )
    both = QuickBounds(each)
    for choice in (few, many):
        assert both.seconds(choice) == QuickBounds(each).seconds(choice)
    assert both.seconds(few) < both.seconds(many)


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


@pytest.mark.slow
def test_a_slow_rank_beside_a_busy_one_does_not_rule_out_what_is_faster() -> None:
    """Every cut of one schedule, simulated: none is faster than the plan that was found."""
    each = replace(problem(batch=2), slowness=(1.0, 1.0, 1.0, 3.0)).with_imbalance(3.5)
    found = find_plan(each, budget=0.2)
    cuts = [choice for choice in space(each) if choice.schedule == "flowmoe"]
    assert cuts and found.best.predicted_s <= min(evaluate(each, choice).predicted_s for choice in cuts)
    assert found.lower_bound_s <= found.best.bound_s <= found.best.predicted_s


def test_transfers_wait_once_for_what_follows_the_last_of_them() -> None:
    """A step in which this bound is tight: memory is slow beside the link, so ends of layers take long."""
    rates = ClusterConfig(
        flops_per_s=1e11,
        memory_bytes_per_s=1e9,
        link_latency_s=1e-6,
        link_bytes_per_s=1e8,
        task_overhead_s=1e-5,
    )
    each = problem((True,), cluster=rates, all_reduce_bytes=0)
    choice = Decision(schedule="penstock", microbatches=2, chunks=1)
    assert 0.97 < QuickBounds(each).seconds(choice) / evaluate(each, choice).predicted_s <= 1 + 1e-9


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


def test_a_pass_of_ones_own_may_treat_layers_differently() -> None:
    """It makes one task, in the last layer: a step with one layer does not tell what it does to others."""
    register(Field(name="told", type=bool, default=False, values=lambda *_: (False,), passes=_telling))
    try:
        each, choice = problem((True,) * 4, cluster=LATE), Decision(more=Table({"told": True}))
        exact = each.bound(choice, each.plan(choice))
        assert QuickBounds(each).seconds(choice) == exact.seconds
    finally:
        unregister("told")


def _telling(told: bool) -> tuple[Pass, ...]:
    return (GatheredLoads(),) if told else ()


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
