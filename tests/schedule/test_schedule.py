"""A schedule as data: its text, its digest, and the check before it runs."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.graph import Graph, Lane, ScheduleError, Task
from penstock.schedule import Schedule, StepPlan
from penstock.step import StepShape
from tests.steps import example_plan, lone_task, random_orders, seeds, shapes


def random_plan(shape: StepShape, seed: int) -> StepPlan:
    graph = build_graph(shape)
    return StepPlan(graph, Schedule(f"random {seed}", random_orders(graph, seed)), shape)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    return random_plan(draw(shapes()), draw(seeds))


def with_lane(schedule: Schedule, lane: Lane, order: Sequence[Task]) -> Schedule:
    return Schedule(schedule.name, {**schedule.lanes, lane: tuple(order)})


def pick(plan: StepPlan, seed: int) -> Task:
    return random.Random(seed).choice(plan.graph.tasks)


def refuses(schedule: Schedule, graph: Graph, why: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(why)):
        schedule.check(graph)


# ---- text --------------------------------------------------------------------------------------------------


@given(plans())
def test_text_round_trips(plan: StepPlan) -> None:
    assert Schedule.parse(plan.schedule.text(), plan.graph) == plan.schedule


def test_an_empty_lane_round_trips() -> None:
    schedule = Schedule("nothing", {Lane.COMPUTE: (), Lane.INTRA: ()})
    assert Schedule.parse(schedule.text(), Graph(())) == schedule


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: expected 'schedule NAME', found ''"),
        ("schedule", "line 1: expected 'schedule NAME'"),
        ("compute: L0.EM.m0.F", "line 1: expected 'schedule NAME', found 'compute: L0.EM.m0.F'"),
        ("schedule s\ncompute L0.EM.m0.F", "line 2: expected 'LANE: TASK ...'"),
        ("schedule s\ncompute: L0.EM.m0.F\nnetwork: L0.ST.F", "line 3: expected 'LANE: TASK ...'"),
        ("schedule s\ncompute: L0.EM.m0.F\n\ninter: L0.ST.F", "line 3: expected 'LANE: TASK ...'"),
        ("schedule s\nnetwork: L0.ST.F", "compute, intra, inter"),
        ("schedule s\ncompute: L0.EM.m0.F L0.EM", "line 2: 'L0.EM' is not a task name"),
        ("schedule s\ncompute: L0.EM.m0.F\ncompute: L0.AT.m0.F", "line 3: lane compute stands twice"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(why)):
        Schedule.parse(text, example_plan("sequential").graph)


def test_a_name_that_the_graph_lacks_is_refused() -> None:
    with pytest.raises(ScheduleError, match=re.escape("L7.AT.m0.F is on lane compute but not in the graph")):
        Schedule.parse("schedule s\ncompute: L0.EM.m0.F L7.AT.m0.F", example_plan("sequential").graph)


# ---- digest ------------------------------------------------------------------------------------------------


@given(shapes(layers=1, pieces=2, chunks=2), st.integers(0, 1), st.integers(0, 1))
def test_digests_are_equal_when_texts_are(shape: StepShape, first: int, second: int) -> None:
    a, b = (random_plan(shape, seed).schedule for seed in (first, second))
    assert (a.digest == b.digest) == (a.text() == b.text())


@given(plans(), seeds)
def test_two_tasks_swapped_change_the_digest(plan: StepPlan, seed: int) -> None:
    lane = random.Random(seed).choice(list(plan.schedule.lanes))
    order = list(plan.schedule.lanes[lane])
    at = random.Random(seed).randrange(len(order))
    order[at - 1], order[at] = order[at], order[at - 1]
    assume(len(order) > 1)
    assert with_lane(plan.schedule, lane, order).digest != plan.schedule.digest


# ---- check -------------------------------------------------------------------------------------------------


@given(plans())
def test_every_order_that_respects_dependencies_passes(plan: StepPlan) -> None:
    plan.schedule.check(plan.graph)


@given(plans(), seeds)
def test_a_missing_task_is_named(plan: StepPlan, seed: int) -> None:
    gone = pick(plan, seed)
    order = [task for task in plan.schedule.lanes[gone.lane] if task != gone]
    refuses(with_lane(plan.schedule, gone.lane, order), plan.graph, f"{gone} is missing (1 in all)")


@given(plans(), seeds)
def test_a_task_that_stands_twice_is_named(plan: StepPlan, seed: int) -> None:
    twice = pick(plan, seed)
    order = [*plan.schedule.lanes[twice.lane], twice]
    refuses(with_lane(plan.schedule, twice.lane, order), plan.graph, f"{twice} stands twice")


@given(plans(), seeds, st.sampled_from(Lane))
def test_a_task_on_another_lane_is_named(plan: StepPlan, seed: int, lane: Lane) -> None:
    moved = pick(plan, seed)
    assume(lane is not moved.lane)
    order = [task for task in plan.schedule.lanes[moved.lane] if task != moved]
    schedule = with_lane(plan.schedule, moved.lane, order)
    schedule = with_lane(schedule, lane, [*plan.schedule.lanes.get(lane, ()), moved])
    why = f"{moved} is on lane {lane}; it runs on lane {moved.lane}"
    refuses(schedule, plan.graph, why)


@given(plans())
def test_a_task_that_the_graph_lacks_is_named(plan: StepPlan) -> None:
    stranger = lone_task(f"L{plan.shape.num_layers}.AT.m0.F")
    order = [*plan.schedule.lanes[Lane.COMPUTE], stranger]
    refuses(with_lane(plan.schedule, Lane.COMPUTE, order), plan.graph, f"{stranger} is on lane compute but")


@given(plans(), seeds)
def test_a_task_before_what_it_waits_for_is_a_deadlock_that_names_it(plan: StepPlan, seed: int) -> None:
    lane, early, late = random.Random(seed).choice(list(_chains(plan)))
    order = [task for task in plan.schedule.lanes[lane] if task != late]
    order.insert(order.index(early), late)
    refuses(with_lane(plan.schedule, lane, order), plan.graph, f"{lane}: {late} waits for ")


def _chains(plan: StepPlan) -> list[tuple[Lane, Task, Task]]:
    """Pairs on one lane of which the second waits for the first, however indirectly."""
    before: dict[Task, set[Task]] = {}
    for task in plan.graph.tasks:
        needs = plan.graph.needs[task]
        before[task] = set(needs).union(*(before[need] for need in needs))
    return [
        (task.lane, first, task)
        for task in plan.graph.tasks
        for first in sorted(before[task], key=plan.graph.position.__getitem__)
        if first.lane is task.lane
    ]
