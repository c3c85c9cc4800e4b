"""The list scheduler: what it freezes is what its rule would do on the simulated timeline."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from hypothesis import given

from penstock.features.build import build_graph
from penstock.graph import Graph, Lane, Task
from penstock.ops import Op
from penstock.schedule import Schedule, freeze
from penstock.step import StepShape
from penstock.timing import simulate
from tests.steps import Times, random_seconds, ready_s, seeds, shapes, task_at

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
    graph = build_graph(StepShape(moe_layers=(True, True), all_reduce_chunks=(0, 2)))
    gap, after = task_at(graph, "L0.U.m0.B"), task_at(graph, "L0.C.m0.c0.B")

    def chunks_in_the_gap(gap_s: float) -> list[str]:
        order = freeze(
            "s", graph, lambda t: gap_s if t == gap else 1.0, lambda t: (int(t.op == Op.ALL_REDUCE),)
        ).lanes[Lane.INTER]
        return [str(task) for task in order[: order.index(after)] if task.op == Op.ALL_REDUCE]

    assert chunks_in_the_gap(1.0) == ["L1.AR.p0.B"]
    assert chunks_in_the_gap(1.5) == ["L1.AR.p0.B", "L1.AR.p1.B"]
