"""What is known of a problem's choices depends on the choice, and not on what was asked before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import lcm
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError, Table
from penstock.cost import ClusterConfig, ProfiledCluster, StepCost
from penstock.cost.cluster_file import TaskModel
from penstock.decision import Decision, Field, Movable, register, unregister
from penstock.decision.record import FIELDS, TRIED_SLICES
from penstock.graph import Graph, ScheduleError
from penstock.mesh import Group
from penstock.ops import Op
from penstock.placement import Replication
from penstock.plan import Problem, estimate_memory, predict_s
from penstock.plan.bound import QuickBounds
from penstock.plan.candidate import Room
from penstock.plan.moving import with_routing
from penstock.plan.predict import bound
from penstock.plan.space import neighbours, space
from penstock.schedule import SCHEDULES, StepPlan
from penstock.step.passes import WeightGradients
from penstock.step.rewrite import Stage, changed
from penstock.workloads import RoutingConfig
from tests.plan.problems import FILE, every_kind, problem
from tests.support.draws import draws

ROUTINGS = ("even", "hot_expert,hot_share=0.6", "dirichlet,dirichlet_concentration=0.1")


@st.composite
def routed(draw: st.DrawFn) -> Problem:
    """A measured step of any kind, routed evenly, or with a routing that is observed or prices it."""
    each, contention = draw(every_kind()), draw(st.floats(1, 2))
    tasks = tuple(
        TaskModel(op=op, phase=phase, alpha_s=1e-5, scale=2.0, contended=contention)
        for op, phase in product(("AT", "X"), "FB")
    )
    file = replace(FILE, rates=each.cluster, tasks=tasks, contended_transfers=draw(st.floats(1, 2)))
    each = replace(each, cluster=ProfiledCluster.build(file))
    kind = draw(st.sampled_from(("even", "observed", "priced")))
    if kind == "even" or not any(each.shape.moe_layers):
        return each
    found = with_routing(each, RoutingConfig.parse(draw(st.sampled_from(ROUTINGS))), each.movable)
    return found if kind == "priced" else replace(found, evidence=None, observed=found.evidence)


def forget() -> None:
    """Empty the caches of all functions of the package, so that the next answer is that of a new process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("penstock."):
            for each in list(vars(module).values()):
                if callable(getattr(each, "cache_clear", None)):
                    each.cache_clear()


def answers(each: Problem, bounds: QuickBounds | None, room: Room, choice: Decision) -> Any:
    """Return everything that a search asks about a choice, or why it is impossible."""
    try:
        plan = each.plan(choice)
        quick_s = None if bounds is None else bounds.seconds(choice)
        needs, fits = estimate_memory(each, choice), room.holds(choice)
        least, seconds = bound(each, choice, plan), predict_s(each, choice, plan)
    except (ScheduleError, ConfigError) as error:
        return str(error)
    return plan.digest, quick_s, needs, fits, least, seconds


def asked(each: Problem, choices: list[Decision], memory_bytes: int) -> list[Any]:
    bounds = None if each.evidence is not None else QuickBounds(each)
    room = Room(each, memory_bytes)
    return [answers(each, bounds, room, choice) for choice in choices]


@dataclass(frozen=True)
class NearCounts:
    """Counts of the last layer are exchanged inside nodes: that layer is no longer like others."""

    name: ClassVar[str] = "near_counts"
    stage: ClassVar[Stage] = Stage.SETTLE

    def __call__(self, graph: Graph) -> Graph:
        last = max((task.layer for task in graph.tasks if task.op == Op.COUNTS), default=0)
        return changed(graph, (Op.COUNTS,), lambda t: replace(t, axes=Group.NODE) if t.layer == last else t)


@pytest.fixture
def own_decisions() -> Iterator[None]:
    """Decisions from outside of the package, which have only a field each."""
    passes = {"late_weights": WeightGradients, "near_counts": NearCounts}
    for name, each in passes.items():
        register(
            Field(
                name=name,
                type=bool,
                default=False,
                values=lambda *_: (False, True),
                passes=lambda value, each=each: (each(),) if value else (),  # type: ignore[misc]
            )
        )
    yield
    for name in passes:
        unregister(name)


def apart(each: Problem, first: Decision, rng: Any) -> list[Decision]:
    """Decisions that differ from the first in one field each, for every field that has another value."""
    found = []
    for name, field in FIELDS.items():
        others = [value for value in field.values(each, first) if value != first.value(name)]
        found += [first.deciding(name, rng.choice(others))] if others else []
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("own_decisions")
@draws(12)
@given(routed(), st.randoms(use_true_random=False))
def test_no_answer_depends_on_what_was_asked_before(each: Problem, rng: Any) -> None:
    """Also of decisions that are possible with no other, and of those that were registered outside."""
    first = rng.choice(list(space(each)))
    near = [*neighbours(each, first), *apart(each, first, rng)]
    choices = [first, *rng.sample(near, min(5, len(near)))]
    memory_bytes = estimate_memory(each, Decision(dispatch=each.dispatches[0])).total_bytes
    alone = []
    for choice in choices:
        forget()
        alone += asked(replace(each), [choice], memory_bytes)
    order = rng.sample(range(len(choices)), len(choices))
    together = asked(replace(each), [choices[i] for i in order], memory_bytes)
    assert together == [alone[i] for i in order]


def worked_out(each: Problem, choice: Decision, plan: StepPlan) -> list[list[float]]:
    """The same on ranks that are alike, without anything that is kept."""
    alone = StepCost(plan.shape, each.workload_of(choice), each.cluster)
    prices = (alone.compute_s if task.lane.computes else alone.communication_s for task in plan.graph.tasks)
    return [[price(task)] for price, task in zip(prices, plan.graph.tasks, strict=True)]


def seconds_of(each: Problem, choice: Decision, plan: StepPlan) -> list[list[float]]:
    """What every task costs on every rank."""
    cost = each.cost(choice, plan.shape)
    return [np.atleast_1d(cost(task)).tolist() for task in plan.graph.tasks]


@pytest.mark.slow
@pytest.mark.usefixtures("own_decisions")
@draws(20)
@given(every_kind(), st.randoms(use_true_random=False))
def test_a_price_that_is_kept_is_that_of_the_task(each: Problem, rng: Any) -> None:
    """Whatever choices were priced before, and however many layers are alike."""
    each = replace(each, slowness=())
    first = rng.choice(list(space(each)))
    for choice in [first, *apart(each, first, rng)]:
        try:
            plan = each.plan(choice)
        except (ScheduleError, ConfigError):
            continue
        assert seconds_of(each, choice, plan) == worked_out(each, choice, plan), choice.words


@pytest.mark.usefixtures("own_decisions")
def test_layers_that_a_pass_of_ones_own_treats_differently_have_prices_of_their_own() -> None:
    each, choice = problem((True,) * 3), Decision(more=Table({"near_counts": True}))
    plan = each.plan(choice)
    prices = seconds_of(each, choice, plan)
    assert prices == worked_out(each, choice, plan)
    assert len({prices[i][0] for i, task in enumerate(plan.graph.tasks) if task.op == Op.COUNTS}) == 2


@pytest.mark.slow
@draws(60)
@given(every_kind(), st.randoms(use_true_random=False))
def test_a_field_affects_no_more_than_it_says(each: Problem, rng: Any) -> None:
    """Else a key that is derived from it would be one of several answers."""
    first = rng.choice(list(space(each)))
    for other in apart(each, first, rng):
        (field,) = (field for name, field in FIELDS.items() if other.value(name) != first.value(name))
        try:
            plan, cut = each.plan(first), each.cut(other)
        except (ScheduleError, ConfigError):
            continue
        if "cut" not in field.affects:
            assert cut == plan.shape, field.name
        if "cost" not in field.affects:
            one, two = (seconds_of(replace(each), choice, plan) for choice in (first, other))
            assert one == two, field.name
        if "order" not in field.affects:
            cost, order = each.cost(first, plan.shape), SCHEDULES[other.schedule].order
            assert order(plan.graph, cost, other) == plan.schedule, field.name
        if "memory" not in field.affects:
            assert estimate_memory(replace(each), first) == estimate_memory(replace(each), other), field.name


@pytest.mark.usefixtures("own_decisions")
def test_a_key_has_what_counts_and_no_more() -> None:
    """A decision from outside counts for everything unless its field says otherwise."""
    late = Table({"late_weights": True})
    choice = Decision(schedule="penstock", chunks=2, priority="critical_path", comm_dtype="int8", more=late)
    assert choice.affecting("cost") == Decision(comm_dtype="int8", more=late)
    assert choice.affecting("cut", "cost") == replace(choice, priority="search")
    assert choice.affecting("cut", "cost", "order") == choice
    FIELDS["late_weights"] = replace(FIELDS["late_weights"], affects=("cut",))
    assert choice.affecting("cost") == Decision(comm_dtype="int8")


@pytest.mark.slow
@draws(16)
@given(routed(), st.randoms(use_true_random=False))
def test_no_order_beats_a_bound_whatever_is_known_of_routing_and_company(each: Problem, rng: Any) -> None:
    choices = list(space(each))
    for choice in rng.sample(choices, min(3, len(choices))):
        try:
            plan = each.plan(choice)
        except (ScheduleError, ConfigError):
            continue
        assert bound(each, choice, plan).seconds <= predict_s(each, choice, plan) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        {"schedule": "moe_pipeline", "chunks": 2, "backward_chunks": 2},
        {"dispatch": "hierarchical_2d"},
        {"comm_dtype": "int8"},
        {"all_reduce_chunk_bytes": 1 << 16},
        {"recompute": "blocks"},
        {"split": "last_step"},
    ],
)
def test_replicas_are_those_of_the_choice_that_is_priced(other: dict[str, Any]) -> None:
    """Slack decides which rank holds which replica, and everything that decides on the order decides on the
    slack."""
    quick = ClusterConfig(flops_per_s=1e11, link_bytes_per_s=1e9)
    each = with_routing(problem((True,) * 3, cluster=quick), RoutingConfig.parse("zipf"), Movable())
    one = Decision(schedule="penstock", microbatches=2, experts="planned")
    apart = {choice: replications(replace(each), choice) for choice in (one, replace(one, **other))}
    assert len(set(apart.values())) == 2, "else nothing is shown"
    for order in (list(apart), list(apart)[::-1]):
        shared = replace(each)
        assert [replications(shared, choice) for choice in order] == [apart[choice] for choice in order]


def replications(each: Problem, choice: Decision) -> tuple[Replication, ...]:
    placed = each.placed(choice, each.cut(choice))
    assert placed is not None
    return placed.replications


def test_a_search_cuts_what_both_halves_share_into_few_slices() -> None:
    """Experts compute every slice for itself, so numbers of chunks with few common factors never pay."""
    degrees = {choice.degrees for choice in space(problem()) if choice.reads("backward_chunks")}
    assert len(degrees) > 1 and (8, 6) in degrees
    assert max(lcm(*each) for each in degrees) <= TRIED_SLICES
