"""The simulator: a published closed form, groups of ranks, and bounds that no schedule beats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Graph, Lane, Phase, Task
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.schedule import SCHEDULES, Schedule, plan_step
from penstock.simulate import LowerBound, Ranks, Seconds, lower_bound, overlap_efficiency, simulate
from penstock.step import StepShape, build_graph
from tests.steps import example_plan, pieces_for, random_orders, random_seconds, seeds, shapes

# ---- a published closed form -------------------------------------------------------------------------------


class IntraTask(Task):
    """A collective inside a node, under the name of a task that meets nobody."""

    @property
    def lane(self) -> Lane:
        return Lane.INTRA


@dataclass(frozen=True)
class HandmadeGraph(Graph):
    """A graph whose dependencies are written down instead of derived."""

    edges: Mapping[Task, tuple[Task, ...]] = field(default_factory=dict)

    @cached_property
    def needs(self) -> Mapping[Task, tuple[Task, ...]]:
        return {task: self.edges.get(task, ()) for task in self.tasks}


def fsmoe(pieces: int) -> tuple[Graph, Schedule]:
    """The MoE part of one layer as FSMoE runs it: D, AG, X, RS, C of every piece, and one all-reduce."""
    numbers = range(pieces)
    dispatch = [Task(0, Op.DISPATCH, Phase.BACKWARD, 0, i) for i in numbers]
    gather: list[Task] = [IntraTask(0, Op.UNORDER, Phase.BACKWARD, 0, i) for i in numbers]
    experts = [Task(0, Op.EXPERTS, Phase.BACKWARD, 0, i) for i in numbers]
    scatter: list[Task] = [IntraTask(0, Op.UNORDER, Phase.BACKWARD, 1, i) for i in numbers]
    combine = [Task(0, Op.COMBINE, Phase.BACKWARD, 0, i) for i in numbers]
    reduce = Task(0, Op.ALL_REDUCE, Phase.BACKWARD, None, 0)
    stages: list[list[Task]] = [dispatch, gather, experts, scatter, combine]
    edges = {task: (need,) for i in range(1, 5) for task, need in zip(stages[i], stages[i - 1], strict=True)}
    lanes = {
        Lane.INTER: (*dispatch, reduce, *combine),
        Lane.INTRA: (*gather, *scatter),
        Lane.COMPUTE: tuple(experts),
    }
    tasks = (*(task for stage in stages for task in stage), reduce)
    return HandmadeGraph(StepShape(moe_layers=(True,)), tasks, edges), Schedule("fsmoe", lanes)


durations = st.integers(0, 100)


@given(st.integers(1, 8), durations, durations, durations, durations, durations)
def test_fsmoe_takes_what_its_exact_formula_says(pieces: int, a: int, g: int, s: int, e: int, r: int) -> None:
    """Pieces R, all-to-all a, all-gather g, reduce-scatter s, experts e, gradient all-reduce r."""
    graph, schedule = fsmoe(pieces)

    def cost(task: Task) -> int:
        if isinstance(task, IntraTask):
            return s if task.microbatch else g
        return {Op.DISPATCH: a, Op.COMBINE: a, Op.EXPERTS: e, Op.ALL_REDUCE: r}[task.op]

    exact = max(
        2 * pieces * a + r,
        2 * a + g + s + (pieces - 1) * (max(a, g) + max(a, s)),
        2 * a + g + s + e + (pieces - 1) * max(a, g, e, s),
    )
    assert simulate(schedule, graph, cost).iteration_s == exact


# ---- ranks -------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> Ranks:
    node_size = draw(st.integers(1, 3))
    ep_size = node_size * draw(st.integers(1, 3))
    told = draw(st.booleans()) or node_size != ep_size  # 0 says the same as ep_size
    return Ranks(ep_size * draw(st.integers(1, 3)), ep_size, node_size if told else 0)


def members(group: Axes, rank: int, ranks: Ranks) -> list[int]:
    """Expert groups and nodes are consecutive ranks; a rail has one of every node of an expert group."""
    everyone, size = range(ranks.world_size), ranks.node_size or ranks.ep_size
    together = {
        Group.ALONE: lambda other: other == rank,
        Group.EXPERT: lambda other: other // ranks.ep_size == rank // ranks.ep_size,
        Group.EXPERT_REPLICAS: lambda other: other % ranks.ep_size == rank % ranks.ep_size,
        Group.NODE: lambda other: other // size == rank // size,
        Group.RAIL: lambda other: (
            other // ranks.ep_size == rank // ranks.ep_size and other % size == rank % size
        ),
        Group.WORLD: lambda other: True,
    }
    return [other for other in everyone if together[group](other)]


@given(worlds(), seeds, st.sampled_from(Axes))
def test_a_group_meets_at_the_latest_of_its_members(ranks: Ranks, seed: int, group: Axes) -> None:
    times = np.random.default_rng(seed).random(ranks.world_size)
    met = ranks.meet(group, times)
    assert met.tolist() == [
        max(times[m] for m in members(group, rank, ranks)) for rank in range(ranks.world_size)
    ]


def test_groups_of_six_ranks() -> None:
    ranks, times = Ranks(6, 3), np.array([1.0, 5.0, 2.0, 4.0, 3.0, 6.0])
    assert ranks.meet(Group.EXPERT, times).tolist() == [5, 5, 5, 6, 6, 6]
    assert ranks.meet(Group.EXPERT_REPLICAS, times).tolist() == [4, 5, 6, 4, 5, 6]
    assert ranks.meet(Group.WORLD, times).tolist() == [6] * 6
    assert ranks.meet(Group.ALONE, times).tolist() == times.tolist()


def rank_seconds(graph: Graph, ranks: Ranks, seed: int) -> dict[Task, Seconds]:
    rng = np.random.default_rng(seed)
    return {task: rng.random(ranks.world_size) for task in graph.tasks}


@given(shapes(layers=2), worlds(), seeds)
def test_every_rank_keeps_the_rule_and_groups_end_together(shape: StepShape, ranks: Ranks, seed: int) -> None:
    """On every rank a task starts when its inputs and its lane are free, and not before or after."""
    graph = build_graph(shape)
    schedule = Schedule("random", random_orders(graph, seed))
    seconds = rank_seconds(graph, ranks, seed)
    times = simulate(schedule, graph, seconds.__getitem__, ranks).times
    for order in schedule.lanes.values():
        for i, task in enumerate(order):
            before = [*graph.needs[task], *order[i - 1 : i]]
            for rank in range(ranks.world_size):
                start = max((times[other].end[rank] for other in before), default=0.0)
                assert times[task].start[rank] == start
                group = members(task.axes, rank, ranks)
                ends = [times[task].start[m] + seconds[task][m] for m in group]
                assert times[task].end[rank] == max(ends)


def test_a_thousand_ranks_cost_no_more_python_than_one() -> None:
    asked: list[Task] = []
    ranks = Ranks(1024, 64)
    shape = StepShape(moe_layers=(True,) * 4, expert_all_reduce_chunks=(1,) * 4)
    plan = plan_step(SCHEDULES["flowmoe"], shape, pieces_for(shape), lambda _: lambda task: 1.0)

    def cost(task: Task) -> Seconds:
        asked.append(task)
        return np.full(1024, 1.0)

    timeline = simulate(plan.schedule, plan.graph, cost, ranks)
    alone = simulate(plan.schedule, plan.graph, lambda task: 1.0)
    assert sorted(asked, key=plan.graph.position.__getitem__) == list(plan.graph.tasks)
    assert timeline.iteration_s == alone.iteration_s
    for task, when in timeline.times.items():
        assert when.start.shape == when.end.shape == (1024,)
        assert set(when.end.tolist()) == set(alone.times[task].end.tolist())


def test_a_slow_rank_holds_up_its_expert_group_first_and_the_world_later() -> None:
    plan = example_plan("sequential")
    slow = np.array([1.0, 1.0, 1.0, 2.0])
    times = simulate(plan.schedule, plan.graph, lambda _: slow, Ranks(4, 2)).times
    assert times[Task.parse("L0.AT.m0.F")].end.tolist() == [2, 2, 2, 4]
    assert times[Task.parse("L0.N.m0.F")].end.tolist() == [3, 3, 6, 6]
    assert len(set(times[Task.parse("L1.ST.F")].end.tolist())) == 1


# ---- timeline and bounds -----------------------------------------------------------------------------------


@given(shapes(layers=2), worlds(), seeds)
def test_no_order_beats_the_lower_bound(shape: StepShape, ranks: Ranks, seed: int) -> None:
    graph = build_graph(shape)
    schedule = Schedule("random", random_orders(graph, seed))
    cost = rank_seconds(graph, ranks, seed).__getitem__
    bound, iteration_s = lower_bound(graph, cost, ranks), simulate(schedule, graph, cost, ranks).iteration_s
    assert bound.seconds <= iteration_s * (1 + 1e-12)
    assert 0 < overlap_efficiency(bound, iteration_s) <= 1 + 1e-12


@given(seeds, st.booleans())
def test_a_chain_of_tasks_reaches_the_critical_path(seed: int, is_moe: bool) -> None:
    plan = plan_step(
        SCHEDULES["sequential"],
        StepShape(moe_layers=(is_moe,)),
        pieces_for(StepShape(moe_layers=(is_moe,))),
        lambda _: lambda task: 1.0,
    )
    seconds = random_seconds(plan.graph, seed)
    iteration_s = simulate(plan.schedule, plan.graph, seconds.__getitem__).iteration_s
    bound = lower_bound(plan.graph, seconds.__getitem__)
    assert bound.critical_path_s == iteration_s == pytest.approx(sum(seconds.values()))
    assert overlap_efficiency(bound, iteration_s) == 1.0


@given(shapes(), seeds)
def test_the_bound_of_a_lane_is_its_work_on_the_slowest_rank(shape: StepShape, seed: int) -> None:
    graph, ranks = build_graph(shape), Ranks(2, 1)
    seconds = rank_seconds(graph, ranks, seed)
    bound = lower_bound(graph, seconds.__getitem__, ranks)
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
    plan, ranks = example_plan("moe_pipeline"), Ranks(2, 1)
    seconds = np.array([1.0, 2.0])
    timeline = simulate(plan.schedule, plan.graph, lambda _: seconds, ranks)
    found = {(record.task, record.rank): record for record in timeline.records()}
    assert set(found) == {(task, rank) for task in plan.graph.tasks for rank in range(2)}
    assert len(timeline.records()) == len(found)
    for (task, rank), record in found.items():
        assert record.start_s == timeline.times[task].start[rank]
        assert record.end_s == timeline.times[task].end[rank]
    assert max(record.end_s for record in found.values()) == timeline.iteration_s
