"""What a run does with the verdict on moving, by simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.autotune.choose import moves
from penstock.autotune.choose.moves import _weighed
from penstock.autotune.planned import Planned
from penstock.decision import Decision, Movable
from penstock.features.expert_replicas.feature import ExpertMoves
from penstock.features.expert_replicas.prices import LATE
from penstock.plan import estimate_memory, evaluate
from penstock.plan.candidate import whole_s
from penstock.plan.effort import time_limit
from penstock.plan.problem import Problem
from tests.plan.problems import FILE
from tests.plan.test_moving import routed

STILL = Decision(schedule="moe_pipeline")
MOVING = replace(STILL, experts="planned", replica_slots=1)
SKEWED = "hot_expert,hot_share=0.5"


def movable(routing: str = SKEWED, *planners: ExpertMoves) -> Problem:
    """A step whose experts may get replicas, by one planner or several."""
    return routed(routing, Movable(experts=("none", *(planners or ("planned",))), replica_slots=(1,)))


def running(problem: Problem, choice: Decision) -> Planned:
    return Planned(problem=problem, choice=choice, plan=evaluate(problem, choice).plan)


@pytest.mark.parametrize(
    ("routing", "choice", "expected"),
    [
        (SKEWED, STILL, MOVING),
        (SKEWED, MOVING, None),
        ("even", STILL, None),
        ("even", MOVING, STILL),
    ],
)
def test_a_plan_changes_only_where_something_else_is_to_move(
    routing: str, choice: Decision, expected: Decision | None
) -> None:
    """What moves already is neither adopted again under another number nor left where it stopped paying."""
    planned = running(movable(routing), choice)
    lines, order = _weighed(planned, True)
    assert [line[:9] for line in lines] == ["Moving   ", "Experts  "]
    found = order and (order.choice.schedule, order.choice.experts)
    assert found == (expected and (expected.schedule, expected.experts))
    assert _weighed(planned, False)[1] is None


def test_ranks_do_not_wait_for_moves_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time is over the plan stays, and lines name what was not weighed."""
    monkeypatch.setattr(moves, "time_limit", lambda clock: time_limit(clock, most_s=-1.0))
    lines, order = _weighed(running(movable(), STILL), True)
    assert order is None
    assert any("not weighed: planned" in line and LATE in line for line in lines)


def test_what_moves_stays_where_another_way_gains_next_to_nothing() -> None:
    """Two planners within half a percent: a run does not change to and fro between them."""
    planners: tuple[ExpertMoves, ...] = ("least_loaded", "planned")
    problem, choices = movable(SKEWED, *planners), [replace(MOVING, experts=name) for name in planners]
    times_s = [evaluate(problem, choice).predicted_s for choice in choices]
    assert times_s[0] != times_s[1] == pytest.approx(times_s[0], rel=0.02)
    for choice in choices:
        assert _weighed(running(problem, choice), True)[1] is None


def test_a_plan_that_moves_is_priced_by_the_routing_that_it_was_weighed_with() -> None:
    weighed = movable()
    evenly = replace(weighed, evidence=None)
    for choice, problem in ((STILL, evenly), (MOVING, weighed)):
        found = evaluate(problem, choice)
        planned = Planned(problem=evenly, choice=choice, plan=found.plan).seeing(weighed.evidence)
        assert planned.predicted_s == pytest.approx(whole_s(problem, found))
        assert (planned.predicted_s == pytest.approx(planned.seeing(None).predicted_s)) == (choice == STILL)


def test_plans_must_hold_the_rows_that_were_observed() -> None:
    """Whatever moves, and also where routing is not observed again; a plan that runs has shown to fit."""
    weighed = movable()
    evenly = replace(weighed, evidence=None)
    planned = running(evenly, STILL)
    seen = planned.seeing(weighed.evidence).seeing(None)
    needed, even = (estimate_memory(each, STILL).total_bytes for each in (weighed, evenly))
    assert estimate_memory(seen.problem, STILL).total_bytes == needed > even
    assert seen.predicted_s == planned.predicted_s
    full = replace(FILE, memory_bytes=1)
    moving = replace(running(weighed, MOVING), file=full)
    assert estimate_memory(weighed, MOVING).total_bytes < needed
    lines, order = _weighed(moving, True)
    assert order is None and lines[0].endswith(" per rank and does not fit")
