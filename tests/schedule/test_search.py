"""The search for orders: valid, deterministic, never worse than where it began, and judged by true times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.config import BenchConfig
from penstock.bench.scheduled import run_config_of
from penstock.cost import ClusterConfig, StepCost
from penstock.decision import Decision
from penstock.graph import Graph, Lane, Task
from penstock.schedule import SCHEDULES, Cost, Schedule, cut, freeze, unit_cost
from penstock.schedule import search as search_module
from penstock.schedule.board import Board, Found, Keys
from penstock.schedule.penstock import remaining_path
from penstock.schedule.search import SCENARIOS, search
from penstock.simulate import simulate
from penstock.step import StepShape, build_graph
from penstock.topology import Layout
from penstock.train.assemble import gradient_bytes, workload
from tests.steps import random_seconds, seeds, shapes
from tests.support.draws import draws

EVALUATIONS = 45
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


def seconds_of(graph: Graph, cost: Cost, factors: tuple[float, float] = (1.0, 1.0)) -> list[float]:
    """Durations in one scenario: computation and transfers by a factor each."""
    compute, transfers = factors
    return [cost(t) * (compute if t.lane is Lane.COMPUTE else transfers) for t in graph.tasks]


def scenarios_s(graph: Graph, cost: Cost, keys: Keys) -> float:
    """What the search makes small."""
    return sum(Board(graph, seconds_of(graph, cost, f)).play(keys).seconds for f in SCENARIOS)


def some_starts(graph: Graph, seed: int) -> list[Mapping[Task, float]]:
    return [{t: -s for t, s in random_seconds(graph, seed + i).items()} for i in range(3)]


def as_keys(graph: Graph, start: Mapping[Task, float]) -> Keys:
    return [start[task] for task in graph.tasks]


def schedule_of(graph: Graph, orders: Sequence[Sequence[int]]) -> Schedule:
    lanes = {lane: tuple(graph.tasks[i] for i in orders[n]) for n, lane in enumerate(Lane)}
    return Schedule("s", {lane: order for lane, order in lanes.items() if order})


# ---- one simulated iteration -------------------------------------------------------------------------------


@given(st.data(), graphs(), seeds)
def test_a_board_gives_the_order_of_the_list_scheduler(data: st.DataObject, graph: Graph, seed: int) -> None:
    seconds, keys = random_seconds(graph, seed), data.draw(key_lists(graph))
    played = Board(graph, seconds_of(graph, seconds.__getitem__)).play(keys)
    frozen = freeze("s", graph, seconds.__getitem__, lambda task: (keys[graph.position[task]],))
    assert schedule_of(graph, played.orders) == frozen


@given(st.data(), graphs(), seeds)
def test_a_board_tells_the_seconds_that_the_simulator_tells(
    data: st.DataObject, graph: Graph, seed: int
) -> None:
    seconds, keys = random_seconds(graph, seed), data.draw(key_lists(graph))
    played = Board(graph, seconds_of(graph, seconds.__getitem__)).play(keys)
    simulated = simulate(schedule_of(graph, played.orders), graph, seconds.__getitem__)
    assert played.seconds == simulated.iteration_s


@given(graphs(), seeds)
def test_a_board_can_be_played_again(graph: Graph, seed: int) -> None:
    board = Board(graph, seconds_of(graph, random_seconds(graph, seed).__getitem__))
    keys = as_keys(graph, random_seconds(graph, seed + 1))
    assert board.play(keys) == board.play(keys)


# ---- the search --------------------------------------------------------------------------------------------


@given(graphs(), seeds, st.integers(0, EVALUATIONS))
def test_what_is_found_is_valid(graph: Graph, seed: int, evaluations: int) -> None:
    cost = random_seconds(graph, seed).__getitem__
    found = search("found", graph, cost, some_starts(graph, seed), evaluations)
    found.check(graph)
    assert found.name == "found"


class NotedBoard(Board):
    """A board that remembers the keys it was last played with: the last of a search are the best."""

    keys: Keys

    def play(self, keys: Keys) -> Found:
        type(self).keys = keys
        return super().play(keys)


@given(graphs(), seeds)
def test_nothing_worse_than_a_start_is_found(graph: Graph, seed: int) -> None:
    cost, starts = random_seconds(graph, seed).__getitem__, some_starts(graph, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "Board", NotedBoard)
        found = search("s", graph, cost, starts, EVALUATIONS)
    keys = NotedBoard.keys
    assert schedule_of(graph, Board(graph, seconds_of(graph, cost)).play(keys).orders) == found
    best_start_s = min(scenarios_s(graph, cost, as_keys(graph, start)) for start in starts)
    assert scenarios_s(graph, cost, keys) <= best_start_s


@given(graphs(), seeds)
def test_without_evaluations_it_is_the_best_of_the_starts(graph: Graph, seed: int) -> None:
    cost, starts = random_seconds(graph, seed).__getitem__, some_starts(graph, seed)
    best = min((as_keys(graph, start) for start in starts), key=lambda k: scenarios_s(graph, cost, k))
    orders = Board(graph, seconds_of(graph, cost)).play(best).orders
    assert search("s", graph, cost, starts, 0) == schedule_of(graph, orders)


@given(cuts(), seeds)
def test_the_same_question_has_the_same_answer(shape: StepShape, seed: int) -> None:
    """Ranks search each for itself, so nothing but graph, costs and starts may matter."""
    graph = build_graph(shape)
    cost, starts = random_seconds(graph, seed).__getitem__, some_starts(graph, seed)
    first = search("s", graph, cost, starts, EVALUATIONS).text()
    assert search("s", build_graph(shape), cost, starts, EVALUATIONS).text() == first


@given(graphs(), seeds)
def test_a_rank_that_is_slow_counts_for_all(graph: Graph, seed: int) -> None:
    """Durations of two ranks give what the slower one of each task gives."""
    one, two = random_seconds(graph, seed), random_seconds(graph, seed + 1)
    slowest = {task: max(one[task], two[task]) for task in graph.tasks}
    starts = some_starts(graph, seed)
    both = search("s", graph, lambda t: np.array([one[t], two[t]]), starts, EVALUATIONS)
    assert both == search("s", graph, slowest.__getitem__, starts, EVALUATIONS)


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
    began, found = (search("s", graph, slow_link, rule, evaluations) for evaluations in (0, 600))
    assert began.lanes == rule_alone(graph, slow_link).lanes
    assert simulate(found, graph, slow_link).iteration_s < simulate(began, graph, slow_link).iteration_s


def test_on_the_default_step_a_slow_link_leaves_room_above_every_rule() -> None:
    graph, slow_link = default_step()
    found = ordered("penstock", graph, slow_link)
    found.check(graph)
    found_s = simulate(found, graph, slow_link).iteration_s
    assert found_s < simulate(rule_alone(graph, slow_link), graph, slow_link).iteration_s
    assert found_s < simulate(ordered("flowmoe", graph, slow_link), graph, slow_link).iteration_s


def test_on_the_default_step_with_equal_tasks_no_rule_is_better() -> None:
    """Computation is all there is here: the rule leaves nothing to gain, so nothing may be lost."""
    graph, _ = default_step()
    found_s = simulate(ordered("penstock", graph, unit_cost), graph, unit_cost).iteration_s
    assert found_s <= simulate(rule_alone(graph, unit_cost), graph, unit_cost).iteration_s


@draws(20)  # each searches in full
@given(graphs(), seeds)
def test_penstock_finds_a_valid_order_for_any_shape(graph: Graph, seed: int) -> None:
    ordered("penstock", graph, random_seconds(graph, seed).__getitem__).check(graph)
