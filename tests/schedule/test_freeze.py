"""The list scheduler: what it freezes is what its rule would do on the simulated timeline."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest
from hypothesis import given

from penstock.decision import Decision, GradientBytes
from penstock.features.build import build_graph
from penstock.graph import Graph, Lane, Task
from penstock.ops import Op
from penstock.ops.core import summed
from penstock.schedule import SCHEDULES, Schedule, StepPlan, freeze, plan_step, unit_cost
from penstock.step import StepShape
from penstock.step.shape import Updating
from penstock.timing import iteration_s, simulate
from tests.steps import SHARED, Times, random_seconds, ready_s, seeds, shapes, task_at
from tests.support.optimum import shortest_s, small_step
from tests.support.searching import short_search

Key = Callable[[Task], tuple[int, ...]]


def random_priority(graph: Graph, seed: int) -> Key:
    """A key for every task, from few values so that ties happen."""
    rng = random.Random(seed)
    keys = {task: (rng.randrange(3),) for task in graph.tasks}
    return keys.__getitem__


def program_order(task: Task) -> tuple[int, ...]:
    del task
    return ()


def replay(schedule: Schedule, graph: Graph, seconds: dict[Task, float]) -> Times:
    """The schedule on one rank. A start is the end of another task to the last bit, as in the freeze."""
    times = simulate(schedule, graph, seconds.__getitem__).times
    return {task: (float(when.start[0]), float(when.end[0])) for task, when in times.items()}


@given(shapes(), seeds)
def test_a_frozen_order_is_valid(shape: StepShape, seed: int) -> None:
    graph = build_graph(shape)
    schedule = freeze("frozen", graph, random_seconds(graph, seed).__getitem__, random_priority(graph, seed))
    schedule.check(graph)
    assert schedule.name == "frozen"


@given(shapes(), seeds)
def test_no_lane_idles_while_one_of_its_tasks_is_ready(shape: StepShape, seed: int) -> None:
    graph = build_graph(shape)
    seconds = random_seconds(graph, seed)
    schedule = freeze("frozen", graph, seconds.__getitem__, random_priority(graph, seed))
    times = replay(schedule, graph, seconds)
    for order in schedule.lanes.values():
        for i, (before, task) in enumerate(pairwise(order)):
            if times[before][1] < times[task][0]:
                earliest = min(ready_s(other, graph, times) for other in order[i + 1 :])
                assert earliest == times[task][0]


@given(shapes(), seeds)
def test_of_the_ready_tasks_the_smallest_key_starts(shape: StepShape, seed: int) -> None:
    graph = build_graph(shape)
    seconds, priority = random_seconds(graph, seed), random_priority(graph, seed)
    schedule = freeze("frozen", graph, seconds.__getitem__, priority)
    times = replay(schedule, graph, seconds)
    for order in schedule.lanes.values():
        for i, task in enumerate(order):
            for other in order[i + 1 :]:
                if ready_s(other, graph, times) <= times[task][0]:
                    assert (priority(task), graph.position[task]) < (priority(other), graph.position[other])


@given(shapes(), seeds)
def test_a_rank_that_is_slow_counts_for_all(shape: StepShape, seed: int) -> None:
    """Durations of two ranks give the order that the slower one of each task gives."""
    graph = build_graph(shape)
    first, second = random_seconds(graph, seed), random_seconds(graph, seed + 1)
    slowest = {task: max(first[task], second[task]) for task in graph.tasks}
    both = freeze("s", graph, lambda task: np.array([first[task], second[task]]), program_order)
    assert both == freeze("s", graph, slowest.__getitem__, program_order)


def test_durations_decide_the_order() -> None:
    """The longer the computation before an all-to-all, the more all-reduce chunks fit under it."""
    graph = build_graph(StepShape(moe_layers=(True, True), pieces={"replicated": (0, 2)}))
    gap, after = task_at(graph, "L0.U.m0.B"), task_at(graph, "L0.C.m0.c0.B")

    def chunks_in_the_gap(gap_s: float) -> list[str]:
        order = freeze(
            "s", graph, lambda t: gap_s if t == gap else 1.0, lambda t: (int(t.op == Op.ALL_REDUCE),)
        ).lanes[Lane.INTER]
        return [str(task) for task in order[: order.index(after)] if task.op == Op.ALL_REDUCE]

    assert chunks_in_the_gap(1.0) == ["L1.AR.p0.B"]
    assert chunks_in_the_gap(1.5) == ["L1.AR.p0.B", "L1.AR.p1.B"]


# ---- whole gradients of two layers at a time ---------------------------------------------------------------


LAYERS = 5
BYTES = GradientBytes((4096,) * LAYERS, (4096,) * LAYERS, (1024,) * LAYERS)


def planned(name: str, *, releases: bool, edp: bool) -> StepPlan:
    """A step of that schedule, cut where it can be. Raises ScheduleError for one that deadlocks."""
    shape = StepShape(
        moe_layers=(True, True, False, True, True),
        sharing=SHARED if SCHEDULES[name].expert_form else StepShape(moe_layers=(True,)).sharing,
        updating=Updating(releases=releases, edp=edp),
    )
    choice = Decision(schedule=name, microbatches=2, chunks=2, all_reduce_chunk_bytes=2048)
    with short_search():
        return plan_step(choice, shape, BYTES, lambda _: unit_cost)


@pytest.mark.parametrize("edp", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_an_order(name: str, edp: bool) -> None:
    plan = planned(name, releases=True, edp=edp)
    plan.schedule.check(plan.graph)
    assert any("room" in task.inputs for task in plan.graph.tasks)


def test_only_sums_are_moved_and_no_earlier_than_something_waits_for_them() -> None:
    kept, released = (planned("sequential", releases=each, edp=True) for each in (False, True))
    for (lane, before), after in zip(
        kept.schedule.lanes.items(), released.schedule.lanes.values(), strict=True
    ):
        names = [[task.name for task in order if not summed(task.op)] for order in (before, after)]
        assert names[0] == names[1], lane
    inter = [task.name for task in released.schedule.lanes[Lane.INTER]]
    first = min(i for i, name in enumerate(inter) if name.layer == 4 and summed(name.op))
    assert inter[first - 1].layer == 3, "layer 2 is the first that waits"


# ---- beside the best that there is -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cases", [4, pytest.param(40, marks=pytest.mark.soak)])
def test_orders_are_near_the_best_on_small_steps(cases: int) -> None:
    gaps = []
    for seed in range(cases):
        graph, seconds = small_step(seed)
        found = SCHEDULES["penstock"].order(graph, seconds.__getitem__, Decision(schedule="penstock"))
        found.check(graph)
        best_s = shortest_s(graph, seconds)
        gaps.append(iteration_s(found, graph, seconds.__getitem__) / best_s - 1)
    assert min(gaps) > -1e-9, "the solver has left something out"
    assert mean(gaps) < 0.005
    assert max(gaps) < 0.03
