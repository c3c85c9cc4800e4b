"""The search for orders: valid, deterministic, never worse than where it began, and judged by true times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import ClusterConfig, StepCost
from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.graph import Graph, Lane, Task
from penstock.lab.bench.config import BenchConfig
from penstock.lab.bench.scheduled import run_config_of
from penstock.schedule import SCHEDULES, Schedule, cut, freeze
from penstock.schedule.penstock import remaining_path
from penstock.schedule.search import TotalOrder, search
from penstock.step import StepShape
from penstock.timing import Cost, Keys, ListScheduler, path_ends, simulate
from penstock.topology import Layout
from penstock.train.assemble import gradient_bytes, workload
from tests.steps import random_orders, random_seconds, seeds, shapes

TRIALS = 45
SLOW_LINK = ClusterConfig(link_bytes_per_s=2.5e7)


@st.composite
def cuts(draw: st.DrawFn) -> StepShape:
    return replace(draw(shapes()), split_experts=draw(st.booleans()))


def graphs() -> st.SearchStrategy[Graph]:
    return cuts().map(build_graph)


@st.composite
def key_lists(draw: st.DrawFn, graph: Graph) -> Keys:
    """A key for every task, from few values so that ties happen."""
    size = len(graph.tasks)
    return draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=size, max_size=size))


def seconds_of(graph: Graph, cost: Cost) -> list[float]:
    return [cost(task) for task in graph.tasks]


def some_starts(graph: Graph, seed: int) -> list[Mapping[Task, float]]:
    return [{t: -s for t, s in random_seconds(graph, seed + i).items()} for i in range(3)]


def as_keys(graph: Graph, start: Mapping[Task, float]) -> Keys:
    return [start[task] for task in graph.tasks]


def lineup_of(graph: Graph, seed: int) -> tuple[TotalOrder, list[list[int]]]:
    """Random durations, and a random order for every lane."""
    lanes = random_orders(graph, seed)
    orders = [[graph.position[task] for task in lanes.get(lane, ())] for lane in Lane]
    return TotalOrder(graph, list(random_seconds(graph, seed).values())), orders


def schedule_of(graph: Graph, orders: Sequence[Sequence[int]]) -> Schedule:
    lanes = {lane: tuple(graph.tasks[i] for i in orders[n]) for n, lane in enumerate(Lane)}
    return Schedule("s", {lane: order for lane, order in lanes.items() if order})


# ---- one simulated iteration -------------------------------------------------------------------------------


@given(st.data(), graphs(), seeds)
def test_a_board_tells_the_seconds_that_the_simulator_tells(
    data: st.DataObject, graph: Graph, seed: int
) -> None:
    seconds, keys = random_seconds(graph, seed), data.draw(key_lists(graph))
    played = ListScheduler(graph, seconds_of(graph, seconds.__getitem__)).play(keys)
    simulated = simulate(schedule_of(graph, played.orders), graph, seconds.__getitem__)
    assert played.seconds == simulated.iteration_s


@given(st.data(), graphs(), seeds, st.floats(0.5, 1.5))
def test_a_board_gives_up_only_what_takes_longer(
    data: st.DataObject, graph: Graph, seed: int, part: float
) -> None:
    scheduler = ListScheduler(graph, seconds_of(graph, random_seconds(graph, seed).__getitem__))
    keys = data.draw(key_lists(graph))
    played = scheduler.play(keys)
    below = scheduler.play_below(keys, part * played.seconds)
    assert below == played or (below is None and part < 1)
    assert scheduler.play_below(keys, played.seconds) == played
    assert scheduler.play_below(keys, 0.99 * max(scheduler.work_s)) is None, "a lane has more work than that"


# ---- all tasks in a row ------------------------------------------------------------------------------------


@given(graphs(), seeds)
def test_a_row_says_the_orders_it_was_made_of(graph: Graph, seed: int) -> None:
    total_order, orders = lineup_of(graph, seed)
    assert list(total_order.orders(total_order.timed(orders).row)) == orders


@given(st.data(), graphs(), seeds)
def test_a_changed_row_is_a_row_and_timed_as_the_simulator_does(
    data: st.DataObject, graph: Graph, seed: int
) -> None:
    total_order, orders = lineup_of(graph, seed)
    timed, tasks = total_order.timed(orders), len(graph.tasks)
    first, second = sorted(
        data.draw(st.lists(st.integers(0, tasks - 1), min_size=2, max_size=2, unique=True))
    )
    move = data.draw(st.sampled_from([total_order.hold, total_order.advance]))
    row = move(timed.row, first, second)
    if row is None:
        assert graph.leads(timed.row[first], timed.row[second])
        return
    assert sorted(row) == list(range(tasks)) and row[:first] == timed.row[:first]
    assert row.index(timed.row[second]) < row.index(timed.row[first])
    assert all(row.index(need) < row.index(task) for task in row for need in graph.links[task])
    after = total_order.again(timed, row, first, inf)
    assert after is not None
    assert after.ends_s == path_ends(total_order.orders(row), graph.links, total_order.seconds)
    assert total_order.again(timed, row, first, 0.99 * after.seconds) is None
    assert total_order.again(timed, row, first, after.seconds * (1 + 1e-9)) == after


# ---- the search --------------------------------------------------------------------------------------------


@given(graphs(), seeds, st.integers(0, TRIALS))
def test_what_is_found_is_valid(graph: Graph, seed: int, trials: int) -> None:
    cost = random_seconds(graph, seed).__getitem__
    found = search("found", graph, cost, some_starts(graph, seed), trials)
    found.check(graph)
    assert found.name == "found"


@given(graphs(), seeds)
def test_nothing_worse_than_a_start_is_found(graph: Graph, seed: int) -> None:
    cost, starts = random_seconds(graph, seed).__getitem__, some_starts(graph, seed)
    found, scheduler = search("s", graph, cost, starts, TRIALS), ListScheduler(graph, seconds_of(graph, cost))
    best_start_s = min(scheduler.play(as_keys(graph, start)).seconds for start in starts)
    assert simulate(found, graph, cost).iteration_s <= best_start_s


@given(graphs(), seeds)
def test_without_trials_it_is_the_best_of_the_starts(graph: Graph, seed: int) -> None:
    cost, starts = random_seconds(graph, seed).__getitem__, some_starts(graph, seed)
    scheduler = ListScheduler(graph, seconds_of(graph, cost))
    best = min((scheduler.play(as_keys(graph, start)) for start in starts), key=lambda found: found.seconds)
    assert search("s", graph, cost, starts, 0) == schedule_of(graph, best.orders)


@given(cuts(), seeds)
def test_the_same_question_has_the_same_answer(shape: StepShape, seed: int) -> None:
    """Ranks search each for itself, so nothing but graph, costs and starts may matter."""
    graph = build_graph(shape)
    cost, starts = random_seconds(graph, seed).__getitem__, some_starts(graph, seed)
    first = search("s", graph, cost, starts, TRIALS).text()
    assert search("s", build_graph(shape), cost, starts, TRIALS).text() == first


# ---- penstock's order --------------------------------------------------------------------------------------


@cache
def default_step() -> tuple[Graph, StepCost]:
    """What `penstock bench` compares unless told otherwise, as penstock cuts it; links are slow."""
    bench = BenchConfig()
    config = replace(run_config_of(bench), schedule=replace(bench.schedule, name="penstock"))
    layout = Layout(world_size=2, ep_size=2, rank=0)
    sizes = gradient_bytes(bench.model, bench.moe, layout)
    shape = StepShape(moe_layers=(True,) * bench.model.num_layers, exchange_counts=False)
    found = cut(config.schedule, shape, sizes)
    return build_graph(found), StepCost(found, workload(config, layout, sizes), SLOW_LINK)


def ordered(name: str, graph: Graph, cost: Cost) -> Schedule:
    return SCHEDULES[name].order(graph, cost, Decision(schedule=name))


def rule_alone(graph: Graph, cost: Cost) -> Schedule:
    """The longest chain of work behind it goes first."""
    remaining_s = remaining_path(graph, cost)
    return freeze("rule", graph, cost, lambda task: (-remaining_s[task],))


def test_searching_gains_on_where_it_began() -> None:
    graph, slow_link = default_step()
    remaining_s = remaining_path(graph, slow_link)
    rule = [{task: -remaining_s[task] for task in graph.tasks}]
    began, found = (search("s", graph, slow_link, rule, trials) for trials in (0, 600))
    assert began.lanes == rule_alone(graph, slow_link).lanes
    assert simulate(found, graph, slow_link).iteration_s < simulate(began, graph, slow_link).iteration_s


@pytest.mark.slow
def test_on_the_default_step_a_slow_link_leaves_room_above_every_rule() -> None:
    graph, slow_link = default_step()
    found = ordered("penstock", graph, slow_link)
    found.check(graph)
    found_s = simulate(found, graph, slow_link).iteration_s
    assert found_s < simulate(rule_alone(graph, slow_link), graph, slow_link).iteration_s
    assert found_s < simulate(ordered("flowmoe", graph, slow_link), graph, slow_link).iteration_s
