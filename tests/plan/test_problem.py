"""What is known of a problem's choices depends on the choice, and not on what was asked before."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from math import lcm
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.cost import ClusterConfig, ProfiledCluster
from penstock.cost.cluster_file import TaskModel
from penstock.decision import Decision, Movable
from penstock.decision.record import TRIED_SLICES
from penstock.graph import ScheduleError
from penstock.placement import Replication
from penstock.plan import MemoryBudget, Problem, estimate_memory, predict_s
from penstock.plan.bound import QuickBounds
from penstock.plan.moving import with_routing
from penstock.plan.predict import bound
from penstock.plan.room import Room
from penstock.plan.space import neighbours, space
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


def asked(each: Problem, choices: list[Decision], memory: MemoryBudget) -> list[Any]:
    bounds = None if each.evidence is not None else QuickBounds(each)
    room = Room(each, memory)
    return [answers(each, bounds, room, choice) for choice in choices]


@pytest.mark.slow
@draws(12)
@given(routed(), st.randoms(use_true_random=False))
def test_no_answer_depends_on_what_was_asked_before(each: Problem, rng: Any) -> None:
    first = rng.choice(list(space(each)))
    near = list(neighbours(each, first))
    choices = [first, *rng.sample(near, min(4, len(near)))]
    memory = MemoryBudget(bytes=estimate_memory(each, Decision(dispatch=each.dispatches[0])).total_bytes)
    alone = []
    for choice in choices:
        forget()
        alone += asked(replace(each), [choice], memory)
    order = rng.sample(range(len(choices)), len(choices))
    together = asked(replace(each), [choices[i] for i in order], memory)
    assert together == [alone[i] for i in order]


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
