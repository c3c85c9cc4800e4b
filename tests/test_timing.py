"""Timing: what happens event by event, a published closed form, groups of ranks, and bounds that no schedule
beats."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Graph, Lane, Name, Phase, ScheduleError, Task
from penstock.mesh import Mesh, Seconds
from penstock.ops import OPS, Op, OpSpec
from penstock.schedule import Schedule
from penstock.step import StepShape
from penstock.timing import (
    Issuing,
    LowerBound,
    issue_order,
    iteration_s,
    lower_bound,
    overlap_efficiency,
    positions,
    simulate,
    slot_order,
)
from tests.steps import example_plan, planned, random_orders, random_seconds, seeds, shapes, task_at
from tests.test_mesh import meshes

Orders = Mapping[Lane, tuple[Task, ...]]

# ---- event by event ----------------------------------------------------------------------------------------


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
    """Whole numbers, so that two ways of adding them agree exactly."""
    rng = random.Random(seed)
    return {task: rng.randint(1, 5) for task in graph.tasks}


@given(shapes(layers=2, pieces=2, chunks=2), seeds, st.booleans())
def test_a_timeline_is_what_happens_event_by_event(shape: StepShape, seed: int, differ: bool) -> None:
    """differ: seconds are given as those of ranks that differ."""
    graph = build_graph(shape)
    orders, ticks = random_orders(graph, seed), random_ticks(graph, seed)
    cost = (lambda task: np.array([ticks[task]])) if differ else ticks.__getitem__
    schedule = Schedule("random", orders)
    times = simulate(schedule, graph, cost).times
    ran = run_events(orders, graph, ticks)
    assert {task: (int(span.start[0]), int(span.end[0])) for task, span in times.items()} == ran
    assert iteration_s(schedule, graph, cost) == max(end for _, end in ran.values())


@given(shapes(layers=2, pieces=2, chunks=2), seeds)
def test_orders_deadlock_exactly_when_the_events_get_stuck(shape: StepShape, seed: int) -> None:
    graph = build_graph(shape)
    rng = random.Random(seed)
    shuffled = {lane: list(order) for lane, order in random_orders(graph, seed).items()}
    for order in shuffled.values():
        at = rng.randrange(len(order))
        order.insert(rng.randrange(len(order)), order.pop(at))
    lanes = {lane: tuple(order) for lane, order in shuffled.items()}
    ran = run_events(lanes, graph, dict.fromkeys(graph.tasks, 1))
    stuck = {lane: [task for task in order if task not in ran] for lane, order in lanes.items()}
    heads = {lane: tasks[0] for lane, tasks in stuck.items() if tasks}
    if not heads:
        assert sorted(issue_order(lanes, graph)) == list(range(len(graph.tasks)))
        return
    for issuing in (None, Issuing(task_s=1e-3, kernel_s=1e-4, halves=False)):
        with pytest.raises(ScheduleError, match="the schedule deadlocks") as caught:
            simulate(Schedule("random", lanes), graph, lambda _: 1.0, issuing=issuing)
        for lane, task in heads.items():
            missing = ", ".join(str(need) for need in graph.needs[task] if need not in ran)
            assert f"{lane}: {task} waits for {missing}" in str(caught.value)


@given(shapes(), seeds)
def test_issue_order_keeps_lanes_and_dependencies(shape: StepShape, seed: int) -> None:
    graph = build_graph(shape)
    orders = random_orders(graph, seed)
    issued = [graph.tasks[place] for place in issue_order(orders, graph)]
    position = {task: i for i, task in enumerate(issued)}
    assert {lane: tuple(t for t in issued if t.lane is lane) for lane in orders} == orders
    assert all(position[need] < position[task] for task in issued for need in graph.needs[task])


# ---- a published closed form -------------------------------------------------------------------------------


def fsmoe(pieces: int) -> tuple[Graph, Schedule]:
    """The MoE part of one layer as FSMoE runs it: D, XG, X, XS, C of every piece, and one all-reduce."""
    stages: list[list[Task]] = []
    for op, lane in (
        (Op.DISPATCH, Lane.INTER),
        (Op.SHARD_GATHER, Lane.INTRA),
        (Op.EXPERTS, Lane.COMPUTE),
        (Op.SHARD_SCATTER, Lane.INTRA),
        (Op.COMBINE, Lane.INTER),
    ):
        before = [{"rows": (task.name,)} for task in stages[-1]] if stages else [{}] * pieces
        names = [Name(0, op, Phase.BACKWARD, 0, chunk) for chunk in range(pieces)]
        stages.append([Task(name, lane, (), read) for name, read in zip(names, before, strict=True)])
    dispatch, gather, experts, scatter, combine = stages
    reduce = Task(Name(0, Op.ALL_REDUCE, Phase.BACKWARD, piece=0), Lane.INTER)
    lanes = {
        Lane.INTER: (*dispatch, reduce, *combine),
        Lane.INTRA: (*gather, *scatter),
        Lane.COMPUTE: tuple(experts),
    }
    return Graph.of([*(task for stage in stages for task in stage), reduce]), Schedule("fsmoe", lanes)


durations = st.integers(0, 100)


@given(st.integers(1, 8), durations, durations, durations, durations, durations)
def test_fsmoe_takes_what_its_exact_formula_says(pieces: int, a: int, g: int, s: int, e: int, r: int) -> None:
    """Pieces R, all-to-all a, all-gather g, reduce-scatter s, experts e, gradient all-reduce r."""
    graph, schedule = fsmoe(pieces)

    def cost(task: Task) -> int:
        return {
            Op.DISPATCH: a,
            Op.COMBINE: a,
            Op.SHARD_GATHER: g,
            Op.SHARD_SCATTER: s,
            Op.EXPERTS: e,
            Op.ALL_REDUCE: r,
        }[task.op]

    exact = max(
        2 * pieces * a + r,
        2 * a + g + s + (pieces - 1) * (max(a, g) + max(a, s)),
        2 * a + g + s + e + (pieces - 1) * max(a, g, e, s),
    )
    assert simulate(schedule, graph, cost).iteration_s == exact


# ---- ranks -------------------------------------------------------------------------------------------------


def rank_seconds(graph: Graph, mesh: Mesh, seed: int) -> dict[Task, Seconds]:
    rng = np.random.default_rng(seed)
    return {task: rng.random(mesh.world_size) for task in graph.tasks}


@given(shapes(layers=2), meshes(), seeds)
def test_every_rank_keeps_the_rule_and_groups_end_together(shape: StepShape, mesh: Mesh, seed: int) -> None:
    """On every rank a task starts when its inputs and its lane are free, and not before or after."""
    graph = build_graph(shape)
    schedule = Schedule("random", random_orders(graph, seed))
    seconds = rank_seconds(graph, mesh, seed)
    times = simulate(schedule, graph, seconds.__getitem__, mesh).times
    for order in schedule.lanes.values():
        for i, task in enumerate(order):
            before = [*graph.needs[task], *order[i - 1 : i]]
            for rank in range(mesh.world_size):
                start = max((times[other].end[rank] for other in before), default=0.0)
                assert times[task].start[rank] == start
                ends = [times[task].start[m] + seconds[task][m] for m in mesh.members(rank, task.axes)]
                assert times[task].end[rank] == max(ends)


def test_a_thousand_ranks_cost_no_more_python_than_one() -> None:
    asked: list[Task] = []
    mesh = Mesh(world_size=1024, ep_size=64)
    shape = StepShape(moe_layers=(True,) * 4, pieces={"experts": (1,) * 4})
    plan = planned("flowmoe", shape)

    def cost(task: Task) -> Seconds:
        asked.append(task)
        return np.full(1024, 1.0)

    timeline = simulate(plan.schedule, plan.graph, cost, mesh)
    alone = simulate(plan.schedule, plan.graph, lambda task: 1.0)
    assert sorted(asked, key=plan.graph.position.__getitem__) == list(plan.graph.tasks)
    assert timeline.iteration_s == alone.iteration_s
    for task, when in timeline.times.items():
        assert when.start.shape == when.end.shape == (1024,)
        assert set(when.end.tolist()) == set(alone.times[task].end.tolist())


def test_a_leg_along_rails_waits_for_its_rail_alone() -> None:
    """Two nodes of two ranks: slow experts on rank 0 hold up rank 2, which has the same place in its node."""
    shape = StepShape(moe_layers=(True,), exchange_counts=False, dispatch=DISPATCHES["hierarchical_2d"].hops)
    plan = planned("sequential", shape)
    slow, usual = np.array([5.0, 1.0, 1.0, 1.0]), np.ones(4)

    def cost(task: Task) -> Seconds:
        return slow if task.op == Op.EXPERTS else usual

    mesh = Mesh(world_size=4, ep_size=4, ep_local_size=2)
    times = simulate(plan.schedule, plan.graph, cost, mesh).times
    assert times[task_at(plan.graph, "L0.D.m0.c0.F")].end.tolist() == [4, 4, 4, 4]
    assert times[task_at(plan.graph, "L0.C.m0.c0.F")].end.tolist() == [10, 6, 10, 6]
    assert times[task_at(plan.graph, "L0.CS.m0.c0.F")].end.tolist() == [11, 11, 11, 11]


# ---- timeline and bounds -----------------------------------------------------------------------------------


@given(shapes(layers=2), meshes(), seeds)
def test_no_order_beats_the_lower_bound(shape: StepShape, mesh: Mesh, seed: int) -> None:
    graph = build_graph(shape)
    schedule = Schedule("random", random_orders(graph, seed))
    cost = rank_seconds(graph, mesh, seed).__getitem__
    bound, iteration_s = lower_bound(graph, cost, mesh), simulate(schedule, graph, cost, mesh).iteration_s
    assert bound.seconds <= iteration_s * (1 + 1e-12)
    assert 0 < overlap_efficiency(bound, iteration_s) <= 1 + 1e-12


@given(seeds, st.booleans())
def test_a_chain_of_tasks_reaches_the_critical_path(seed: int, is_moe: bool) -> None:
    plan = planned("sequential", StepShape(moe_layers=(is_moe,)))
    seconds = random_seconds(plan.graph, seed)
    iteration_s = simulate(plan.schedule, plan.graph, seconds.__getitem__).iteration_s
    bound = lower_bound(plan.graph, seconds.__getitem__)
    assert bound.critical_path_s == iteration_s == pytest.approx(sum(seconds.values()))
    assert overlap_efficiency(bound, iteration_s) == 1.0


@given(shapes(), seeds)
def test_the_bound_of_a_lane_is_its_work_on_the_slowest_rank(shape: StepShape, seed: int) -> None:
    graph, mesh = build_graph(shape), Mesh(world_size=2)
    seconds = rank_seconds(graph, mesh, seed)
    bound = lower_bound(graph, seconds.__getitem__, mesh)
    work = {
        lane: max(sum(float(seconds[t][rank]) for t in graph.tasks if t.lane is lane) for rank in range(2))
        for lane in (Lane.COMPUTE, Lane.INTRA, Lane.INTER)
    }
    assert bound.busiest_lane_s == pytest.approx(max(work.values()))
    assert work[bound.busiest_lane] == max(work.values())


def test_an_iteration_without_time_is_perfect() -> None:
    bound = LowerBound(busiest_lane=Lane.COMPUTE, busiest_lane_s=2.0, critical_path_s=3.0)
    assert overlap_efficiency(bound, 6.0) == 0.5
    assert overlap_efficiency(bound, 0.0) == 1.0


def test_records_hold_every_task_of_every_rank_once() -> None:
    plan, mesh = example_plan("moe_pipeline"), Mesh(world_size=2)
    seconds = np.array([1.0, 2.0])
    timeline = simulate(plan.schedule, plan.graph, lambda _: seconds, mesh)
    found = {(record.task, record.rank): record for record in timeline.records()}
    assert set(found) == {(task, rank) for task in plan.graph.tasks for rank in range(2)}
    assert len(timeline.records()) == len(found)
    for (task, rank), record in found.items():
        assert record.start_s == timeline.times[task].start[rank]
        assert record.end_s == timeline.times[task].end[rank]
    assert max(record.end_s for record in found.values()) == timeline.iteration_s


# ---- one thread that hands out all tasks -------------------------------------------------------------------


def test_small_tasks_take_as_long_as_handing_them_out() -> None:
    """Four pieces of five tasks and an all-reduce, a millisecond each, of which the device needs a part."""
    graph, schedule = fsmoe(4)
    issuing = Issuing(task_s=1e-3 - OpSpec.launches * 1e-4, kernel_s=1e-4)
    with_experts = 17 * 1e-3 + 4 * (1e-3 + (OPS[Op.EXPERTS].launches - OpSpec.launches) * 1e-4)
    timeline = simulate(schedule, graph, lambda _: 1e-4, issuing=issuing)
    assert timeline.iteration_s == pytest.approx(with_experts)
    long = simulate(schedule, graph, lambda _: 1.0, issuing=issuing).iteration_s
    assert long == pytest.approx(simulate(schedule, graph, lambda _: 1.0).iteration_s, rel=1e-2)


def test_the_host_waits_for_counts_before_it_hands_out_what_they_cut() -> None:
    """Counts take 5 s on the device; what stands after their first reader is not handed out before."""
    plan = example_plan("flowmoe")
    counts, issuing = task_at(plan.graph, "L0.N.m0.F"), Issuing(task_s=1e-3, kernel_s=0.0)
    times = simulate(
        plan.schedule, plan.graph, lambda task: 5.0 if task is counts else 0.01, issuing=issuing
    ).times
    forward = [task.forward for task in plan.graph.tasks]
    row = slot_order(positions(plan.schedule.lanes, plan.graph), plan.graph.links, forward)
    order = [plan.graph.tasks[place] for place in row]
    reader = next(place for place, task in enumerate(order) if counts in plan.graph.needs[task])
    assert all(times[task].start[0] >= times[counts].end[0] for task in order[reader:])
    assert any(times[task].start[0] < times[counts].end[0] for task in order[:reader] if task is not counts)


@given(shapes(), seeds, seeds, st.floats(0, 2), st.floats(0, 1))
def test_handing_out_only_prolongs_steps(
    shape: StepShape, orders: int, durations: int, task_s: float, kernel_s: float
) -> None:
    graph = build_graph(shape)
    schedule, issuing = Schedule("random", random_orders(graph, orders)), Issuing(task_s, kernel_s)
    cost = random_seconds(graph, durations).__getitem__
    with_it = simulate(schedule, graph, cost, issuing=issuing).iteration_s
    assert with_it >= simulate(schedule, graph, cost).iteration_s
    issued_s = sum(issuing.seconds(task) for task in graph.tasks if task.lane is not Lane.HOST)
    assert with_it >= issued_s * (1 - 1e-12)
    arrays = simulate(schedule, graph, lambda task: np.array([cost(task)]), issuing=issuing)
    assert arrays.iteration_s == pytest.approx(with_it)
