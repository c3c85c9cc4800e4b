"""Costs read off a run: medians, and for a collective the rank that came last."""

from __future__ import annotations

import random
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import MeasuredCost
from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.graph import Lane, Task
from penstock.mesh import Mesh, Seconds
from penstock.ops import Op
from penstock.schedule import SCHEDULES
from penstock.step import StepShape
from penstock.timing import lower_bound, simulate, slowest
from penstock.trace import TaskRecord
from tests.steps import lone_task


def record(name: str, rank: int, duration_s: float, *, step: int = 0) -> TaskRecord:
    return TaskRecord(lone_task(name), rank, 8.0, 8.0 + duration_s, step)


def measured(*records: TaskRecord) -> MeasuredCost:
    return MeasuredCost.from_records(records, lambda task: -1.0)


def test_a_collective_costs_what_the_last_rank_to_arrive_sees() -> None:
    for name in ("L0.D.m0.c0.F", "L0.N.m0.F", "L0.ST.F", "L0.AR.p0.B", "L0.XR.p0.B"):
        cost = measured(record(name, 0, 5.0), record(name, 1, 2.0), record(name, 2, 3.0))
        assert cost(lone_task(name)) == 2.0


def test_a_computation_costs_what_it_costs_on_the_slowest_rank() -> None:
    """A rank that is slow in every step counts; a single slow step does not."""
    name = "L0.AT.m0.F"
    slow = [record(name, 0, 5.0, step=step) for step in range(3)]
    disturbed = [record(name, 1, seconds, step=step) for step, seconds in enumerate((2.0, 90.0, 2.0))]
    assert measured(*slow, *disturbed)(lone_task(name)) == 5.0


def test_steps_are_taken_apart_before_the_minimum() -> None:
    """The fastest rank of one step says nothing about another step."""
    name = "L0.D.m0.c0.F"
    steps = [record(name, rank, 1.0 + step + rank, step=step) for step in range(3) for rank in range(2)]
    assert measured(*steps)(lone_task(name)) == 2.0


@given(st.lists(st.integers(1, 100), min_size=1), st.randoms(use_true_random=False))
def test_the_median_of_a_kind_does_not_depend_on_the_order_of_records(
    ticks: list[int], rng: random.Random
) -> None:
    records = [record(f"L0.X.m0.c{chunk}.B", 0, tick) for chunk, tick in enumerate(ticks)]
    rng.shuffle(records)
    assert measured(*records)(lone_task("L0.X.m0.c0.B")) == median(ticks)


def test_layers_ops_and_phases_are_different_kinds() -> None:
    names = ("L0.AT.m0.F", "L0.AT.m0.B", "L1.AT.m0.F", "L0.U.m0.F")
    cost = measured(*(record(name, 0, float(i)) for i, name in enumerate(names)))
    assert [cost(lone_task(name)) for name in names] == [0.0, 1.0, 2.0, 3.0]


def test_a_piece_that_never_ran_costs_what_its_kind_does() -> None:
    cost = measured(record("L0.AR.p0.B", 0, 2.0))
    assert cost(lone_task("L0.AR.p5.B")) == 2.0


def test_a_kind_that_never_ran_costs_what_the_fallback_says() -> None:
    cost = MeasuredCost.from_records([record("L0.AT.m0.F", 0, 1.0)], lambda task: float(task.layer))
    assert cost(lone_task("L3.AT.m0.F")) == 3.0


def test_ranks_that_are_slow_in_different_layers_do_not_lengthen_the_bound() -> None:
    """What no order of the tasks beats, of a step's own records, is not above that step."""
    shape = StepShape(moe_layers=(True,) * 4, microbatches=4)
    graph = build_graph(shape)
    uneven = {0: np.array([0.2, 1.8]), 1: np.array([1.8, 0.2])}
    mesh = Mesh(world_size=2, ep_size=2)

    def cost(task: Task) -> float | Seconds:
        return uneven[task.layer % 2] if task.op == Op.EXPERTS else 0.1

    order = SCHEDULES["flowmoe"].order(graph, cost, Decision(schedule="flowmoe", microbatches=4))
    timeline = simulate(order, graph, cost, mesh)
    found = MeasuredCost.from_records(timeline.records(), lambda task: -1.0)
    busiest_s = sum(slowest(found(task)) for task in graph.tasks if task.lane is Lane.COMPUTE)
    least_s = lower_bound(graph, found.on_ranks, mesh).seconds
    assert least_s == pytest.approx(lower_bound(graph, cost, mesh).seconds)
    assert least_s <= timeline.iteration_s < busiest_s
