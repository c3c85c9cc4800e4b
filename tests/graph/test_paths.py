"""The longest path against a simulation of events, and what a deadlock says."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given

from penstock.features.build import build_graph
from penstock.graph import Graph, Lane, ScheduleError, Task, longest_path
from penstock.graph.paths import issue_order
from penstock.step import StepShape
from tests.steps import random_orders, seeds, shapes, task_at

Orders = Mapping[Lane, Sequence[Task]]


@dataclass(frozen=True)
class Ticks:
    """Whole numbers, so that two ways of adding them agree exactly."""

    cost: Mapping[Task, int]

    def zero(self) -> int:
        return 0

    def latest(self, first: int, second: int) -> int:
        return max(first, second)

    def end(self, task: Task, start: int) -> int:
        return start + self.cost[task]


def run_events(orders: Orders, graph: Graph, cost: Mapping[Task, int]) -> dict[Task, tuple[int, int]]:
    """Walk the clock tick by tick; tasks that never start are left out."""
    times: dict[Task, tuple[int, int]] = {}
    queues = {lane: list(order) for lane, order in orders.items()}
    now = 0
    while True:
        ended = {task for task, (_, end) in times.items() if end <= now}
        for lane, queue in queues.items():
            free = all(end <= now for task, (_, end) in times.items() if task.lane is lane)
            if queue and free and ended.issuperset(graph.needs[queue[0]]):
                task = queue.pop(0)
                times[task] = (now, now + cost[task])
        if all(end <= now for _, end in times.values()):
            return times
        now += 1


def random_ticks(graph: Graph, seed: int) -> dict[Task, int]:
    rng = random.Random(seed)
    return {task: rng.randint(1, 5) for task in graph.tasks}


@given(shapes(layers=2, pieces=2, chunks=2), seeds)
def test_longest_path_is_what_happens_event_by_event(shape: StepShape, seed: int) -> None:
    graph = build_graph(shape)
    orders, cost = random_orders(graph, seed), random_ticks(graph, seed)
    path = longest_path(orders, lambda task: graph.needs[task], Ticks(cost))
    assert {task: tuple(times) for task, times in path.items()} == run_events(orders, graph, cost)


@given(shapes(layers=2, pieces=2, chunks=2), seeds)
def test_orders_deadlock_exactly_when_the_events_get_stuck(shape: StepShape, seed: int) -> None:
    graph = build_graph(shape)
    rng = random.Random(seed)
    shuffled = {lane: list(order) for lane, order in random_orders(graph, seed).items()}
    for order in shuffled.values():
        at = rng.randrange(len(order))
        order.insert(rng.randrange(len(order)), order.pop(at))
    ran = run_events(shuffled, graph, dict.fromkeys(graph.tasks, 1))
    stuck = {lane: [task for task in order if task not in ran] for lane, order in shuffled.items()}
    heads = {lane: tasks[0] for lane, tasks in stuck.items() if tasks}
    if not heads:
        assert len(list(issue_order(shuffled, lambda task: graph.needs[task]))) == len(graph.tasks)
        return
    with pytest.raises(ScheduleError, match="the schedule deadlocks") as caught:
        longest_path(shuffled, lambda task: graph.needs[task], Ticks(dict.fromkeys(graph.tasks, 1)))
    for lane, task in heads.items():
        missing = ", ".join(str(need) for need in graph.needs[task] if need not in ran)
        assert f"{lane}: {task} waits for {missing}" in str(caught.value)


@given(shapes(), seeds)
def test_issue_order_keeps_lanes_and_dependencies(shape: StepShape, seed: int) -> None:
    graph = build_graph(shape)
    orders = random_orders(graph, seed)
    issued = list(issue_order(orders, lambda task: graph.needs[task]))
    position = {task: i for i, task in enumerate(issued)}
    assert {lane: tuple(t for t in issued if t.lane is lane) for lane in orders} == orders
    assert all(position[need] < position[task] for task in issued for need in graph.needs[task])


def test_two_lanes_that_wait_for_each_other_are_both_named() -> None:
    graph = build_graph(StepShape(moe_layers=(True,), exchange_counts=False))
    orders = {
        Lane.COMPUTE: [task_at(graph, name) for name in ("L0.EM.m0.F", "L0.X.m0.c0.F", "L0.AT.m0.F")],
        Lane.INTER: [task_at(graph, "L0.D.m0.c0.F")],
    }
    with pytest.raises(ScheduleError) as caught:
        list(issue_order(orders, lambda task: graph.needs[task]))
    assert str(caught.value) == (
        "the schedule deadlocks; compute: L0.X.m0.c0.F waits for L0.D.m0.c0.F, L0.AT.m0.F; "
        "inter: L0.D.m0.c0.F waits for L0.AT.m0.F"
    )
