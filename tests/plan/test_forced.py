"""What a setting demands holds in the answer of every planner, and in every plan that a search shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest

from penstock.config import ConfigError
from penstock.decision import Decision, Field, GradientBytes, Movable, register, unregister
from penstock.decision.record import PriorityName, RowForm
from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.feature import ExpertMoves, Split
from penstock.features.sample_placement.feature import SampleMoves
from penstock.graph import ScheduleError
from penstock.plan import Problem, find_plan
from penstock.plan.layouts import LayoutSizes, rank_layouts
from penstock.plan.moving import weigh, with_routing
from penstock.plan.published import planners
from penstock.plan.search import first_choices
from penstock.plan.space import forced, space
from penstock.schedule import SCHEDULES
from penstock.schedule.flowmoe import FlowMoE
from penstock.step import StepShape
from penstock.step.shape import Recompute
from penstock.workloads import RoutingConfig
from tests.plan.problems import problem, with_sharing

WARMTH = Field(name="warmth", type=int, default=0, values=lambda asked, choice: (7,))


@pytest.fixture
def warmth() -> Iterator[None]:
    register(WARMTH)
    yield
    unregister("warmth")


def small(**more: Any) -> Problem:
    return problem((True,), batch=2, **more)


def moving(**fixed: Any) -> Problem:
    return replace(small(), movable=Movable(**fixed))


def replicas(**fixed: Any) -> Problem:
    return moving(experts=("planned",), **fixed)


FORCED: list[tuple[Problem, str, object]] = [
    *((moving(samples=(value,)), "samples", value) for value in get_args(SampleMoves)),
    *((moving(experts=(value,)), "experts", value) for value in get_args(ExpertMoves)),
    *((replicas(replica_slots=(value,)), "replica_slots", value) for value in (1, 2, 5)),
    *((replicas(split=value), "split", value) for value in get_args(Split)),
    *((small(dispatches=(value,)), "dispatch", value) for value in DISPATCHES),
    *((replace(small(), comm_dtypes=(value,)), "comm_dtype", value) for value in get_args(RowForm)),
    *((replace(small(), recompute=(value,)), "recompute", value) for value in get_args(Recompute)),
    *(
        (forced(small(), {name: value}), name, value)
        for name, value in (
            *(("schedule", name) for name in ("sequential", "lina", "fsmoe", "flowmoe", "penstock")),
            ("microbatches", 2),
            ("chunks", 5),
            ("chunks", 32),
            ("backward_chunks", 7),
            ("all_reduce_chunk_bytes", 12345),
            *(("priority", name) for name in get_args(PriorityName)),
        )
    ),
]


def answers(each: Problem) -> Iterator[tuple[str, Decision]]:
    """Yield the choices of every planner, and of all that a search begins with."""
    yield from ((name, planner(each)) for name, planner in planners(each).items())
    yield from (("first", choice) for choice in first_choices(each))
    ranked = rank_layouts([LayoutSizes(tp_size=1, ep_size=4, etp_size=1)], lambda _: [each])
    yield "layout", ranked.best.best.choice


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("each", "name", "value"), FORCED)
@pytest.mark.slow
def test_a_forced_setting_holds_in_every_answer(
    each: Problem, name: str, value: object, shared: bool
) -> None:
    if shared and name == "dispatch":
        pytest.skip("ranks that share experts have a flat dispatch here")
    each = with_sharing(each, 2, 2) if shared else each
    for planner, choice in answers(each):
        assert choice.value(name) == value, (planner, choice.words)
        assert name != "replica_slots" or choice.num_replica_slots == value
        each.cut(choice)  # it can be had, too
    assert {choice.value(name) for choice in space(each)} == {value}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("samples", "experts", "dispatch", "comm_dtype", "recompute"),
        *("schedule", "microbatches", "chunks", "backward_chunks", "all_reduce_chunk_bytes", "priority"),
    ],
)
def test_a_search_shows_nothing_else(name: str) -> None:
    each, _, value = [case for case in FORCED if case[1] == name][-1]
    found = find_plan(each, effort="low")
    assert {candidate.choice.value(name) for candidate in (found.best, *found.others)} == {value}
    assert not found.searched.skipped


def test_settings_that_go_together_hold_together() -> None:
    each = forced(
        small(), {"schedule": "penstock", "microbatches": 2, "chunks": 4, "priority": "critical_path"}
    )
    found = find_plan(each, budget=0.01)
    for choice in [
        *(choice for _, choice in answers(each)),
        found.best.choice,
        *(x.choice for x in found.others),
    ]:
        assert (choice.schedule, choice.microbatches, choice.chunks) == ("penstock", 2, 4)
        assert choice.priority == "critical_path"
    moves = replace(each, movable=Movable(experts=("none", "planned")))
    routed = with_routing(moves, RoutingConfig.parse("hot_expert"), moves.movable)
    weighed = weigh(routed, [found.best.choice])
    assert {weighed.still.choice.priority, weighed.best.choice.priority} == {"critical_path"}


def test_an_expert_form_that_is_set_holds() -> None:
    for form in ("gather", "s1", "s2"):
        each = forced(with_sharing(small(), 2, 2), {"expert_form": form})
        assert {choice.form for _, choice in answers(each)} == {form}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"schedule": "parm_s1"}, "schedule.name"),
        ({"schedule": "sequential", "microbatches": 2}, "schedule.microbatches"),
        ({"schedule": "fsmoe", "priority": "search"}, "schedule.priority"),
        ({"microbatches": 3}, "schedule.microbatches"),
        ({"expert_form": "s1"}, "schedule.expert_form"),
    ],
)
def test_what_no_plan_could_keep_is_refused(given: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forced(small(), given)
    assert caught.value.key == key


@pytest.mark.usefixtures("warmth")
def test_so_does_a_registered_decision() -> None:
    assert {choice.value("warmth") for _, choice in answers(small())} == {7}


def test_planners_that_would_drop_a_setting_are_left_out() -> None:
    """S1 and S2 send rows to all shards at once, which samples and experts that move do not."""
    shared = with_sharing(problem(), 2, 2)
    assert "parm" in planners(shared)
    for movable in (Movable(samples=("netmoe",)), Movable(experts=("planned",))):
        assert "parm" not in planners(replace(shared, movable=movable))


class Picky(FlowMoE):
    """A schedule of one's own for ranks that share no attention, and flat dispatches."""

    name = "picky"

    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        if shape.sharing.tp_size > 1:
            raise ScheduleError("it has no cut for shared attention")
        if len(shape.dispatch) > 1:
            raise ScheduleError("it knows one leg")
        return super().shape(shape, choice, gradients)


def test_a_schedule_that_cannot_cut_a_step_is_left_out_of_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, Picky.name, Picky())
    alone, shared = small(), with_sharing(small(), 2, 2)
    assert "picky" in {choice.schedule for choice in space(alone)}
    nodes = small(dispatches=("flat", "hierarchical_2d"))
    assert {each.dispatch for each in space(nodes) if each.schedule == "picky"} == {"flat"}
    (left_out,) = find_plan(nodes, effort="quick").searched.impossible
    assert left_out == "picky with dispatch hierarchical_2d: it knows one leg"
    found = find_plan(shared, effort="quick")
    assert found.searched.impossible == ("picky: it has no cut for shared attention",)
    sizes = [LayoutSizes(tp_size=size, ep_size=4, etp_size=size) for size in (1, 2)]
    steps = {1: alone, 2: shared}
    ranked = rank_layouts(sizes, lambda each: [forced(steps[each.tp_size], {"schedule": "picky"})])
    assert [each.sizes for each in ranked.ranked] == sizes[:1] and len(ranked.refused) == 1
    with pytest.raises(ConfigError) as caught:
        forced(shared, {"schedule": "picky"})
    assert caught.value.key == "schedule.name"
