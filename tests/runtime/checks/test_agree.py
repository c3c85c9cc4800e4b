"""Ranks compare their schedules before they run them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock.features.build import build_graph
from penstock.graph import Graph, Lane
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.core import Hop
from penstock.runtime.consistency import (
    ScheduleMismatchError,
    check_agreement,
    check_layouts,
    first_difference,
)
from penstock.schedule import Schedule, StepPlan
from penstock.schedule.system import all_reduce_at_the_end
from penstock.step import Stage, StepShape
from penstock.topology import Control, Layout
from tests.steps import example_plan
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow


def swapped(schedule: Schedule, lane: Lane, place: int) -> Schedule:
    """Two neighbours on a lane in the other order."""
    order = list(schedule.lanes[lane])
    order[place], order[place + 1] = order[place + 1], order[place]
    return Schedule(schedule.name, {**schedule.lanes, lane: tuple(order)})


def plan_of(text: str, graph: Graph) -> StepPlan:
    return StepPlan(graph, Schedule.parse(text, graph), StepShape(moe_layers=(True, True)))


def compare(rank: int, texts: list[str]) -> None:
    check_agreement(plan_of(texts[rank], example_plan("flowmoe").graph), Control(rank, len(texts)))


@pytest.mark.parametrize(("lane", "place"), [(Lane.INTER, 3), (Lane.COMPUTE, 0)])
@pytest.mark.parametrize(("world_size", "odd"), [(2, [1]), (2, [0]), (4, [2, 3])])
def test_every_rank_learns_the_first_task_that_differs(
    ranks: Pools, lane: Lane, place: int, world_size: int, odd: list[int]
) -> None:
    plan = example_plan("flowmoe")
    usual = plan.schedule
    other = swapped(usual, lane, place)
    texts = [(other if rank in odd else usual).text() for rank in range(world_size)]
    if len(odd) > 1:  # the last one differs from the others again, and somewhere else
        texts[odd[-1]] = swapped(usual, lane, place + 3).text()
    answers = ranks(world_size).told(ScheduleMismatchError, compare, texts)
    assert len(set(answers)) == 1
    first = odd[0] or 1  # the first rank that differs from rank 0
    mine, theirs = (Schedule.parse(texts[rank], plan.graph).lanes[lane][place] for rank in (0, first))
    assert f"lane {lane}, place {place}: rank 0 runs {mine}, rank {first} runs {theirs}." in answers[0]
    different = odd if 0 not in odd else [rank for rank in range(world_size) if rank not in odd]
    assert f"Ranks that differ from rank 0: {different}" in answers[0]


def compare_layouts(rank: int, batches: tuple[int, int], tensor: tuple[int, int]) -> None:
    layout = Layout(world_size=2, ep_size=2, rank=rank, tp_size=tensor[rank])
    check_layouts(layout, batches[rank], Control(rank, 2))


def test_ranks_of_different_layouts_are_told_before_they_wait_for_each_other(ranks: Pools) -> None:
    ranks(2).run(compare_layouts, (4, 4), (2, 2))
    for batches, tensor, said in (
        ((4, 4), (1, 2), "different layouts: tp_size = 1 on rank 0, 2 on rank 1"),
        ((4, 2), (2, 2), "samples = 4 on rank 0, 2 on rank 1"),
    ):
        for text in ranks(2).told(ScheduleMismatchError, compare_layouts, batches, tensor):
            assert said in text


def compare_built(rank: int, shapes: list[StepShape]) -> None:
    """Every rank builds its own graph and puts its tasks in program order."""
    graph = build_graph(shapes[rank])
    plan = StepPlan(graph, all_reduce_at_the_end("s", graph), shapes[rank])
    check_agreement(plan, Control(rank, len(shapes)))


def test_the_same_order_of_tasks_that_meet_others_is_a_difference(ranks: Pools) -> None:
    """Names alone do not say who is met: along rails or along the whole expert group."""
    inside = Hop(Op.DISPATCH_GATHER, Group.NODE)
    shapes = [
        StepShape(moe_layers=(True,), dispatch=(inside, Hop(Op.DISPATCH, axes, Lane.INTER)))
        for axes in (Group.RAIL, Group.EXPERT)
    ]
    answers = ranks(2).told(ScheduleMismatchError, compare_built, shapes)
    assert len(set(answers)) == 1
    assert (
        "rank 0 has the task `L0.D.m0.c0.F inter ep_node rows=L0.DG.m0.c0.F route=L0.N.m0.F`, "
        "rank 1 has `L0.D.m0.c0.F inter ep rows=L0.DG.m0.c0.F route=L0.N.m0.F`"
    ) in answers[0]


@dataclass(frozen=True)
class _Reading:
    """A pass that renames what N reads: it has no backward, so no gradient is lost."""

    role: str
    name = "reading"
    stage = Stage.SETTLE

    def __call__(self, graph: Graph) -> Graph:
        def renamed(role: str) -> str:
            return self.role if role == "counts" else role

        return Graph.of(
            replace(task, inputs={renamed(role): names for role, names in task.inputs.items()})
            for task in graph.tasks
        )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            {"all_reduce_parts": ((1, 1),)},
            {"all_reduce_parts": ((1, 2),)},
            id="cut",
        ),
        pytest.param({"more": (_Reading("counts"),)}, {"more": (_Reading("sequence"),)}, id="role"),
    ],
)
def test_every_fact_of_a_task_is_compared(
    ranks: Pools, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Pieces of other sizes would never match on the wire, though they have the same names."""
    shapes = [StepShape(moe_layers=(True,), **change) for change in (first, second)]
    answers = ranks(2).told(ScheduleMismatchError, compare_built, shapes)
    assert len(set(answers)) == 1
    assert answers[0].startswith("schedule 's' differs between ranks: rank 0 has the task `")


def test_a_missing_task_a_missing_lane_and_another_name_are_differences() -> None:
    plan = example_plan("sequential")
    usual, graph = plan.schedule, plan.graph.text()

    def difference(first: Schedule, second: Schedule) -> str:
        return first_difference((first.text(), graph), (second.text(), graph), 5)

    order = usual.lanes[Lane.INTER]
    shorter = Schedule(usual.name, {**usual.lanes, Lane.INTER: order[:-1]})
    place = len(order) - 1
    expected = f"lane inter, place {place}: rank 0 runs {order[-1]}, rank 5 runs nothing"
    assert difference(usual, shorter) == expected
    expected = f"lane inter, place {place}: rank 0 runs nothing, rank 5 runs {order[-1]}"
    assert difference(shorter, usual) == expected
    alone = Schedule(usual.name, {Lane.COMPUTE: usual.lanes[Lane.COMPUTE]})
    assert difference(alone, usual) == f"lane inter, place 0: rank 0 runs nothing, rank 5 runs {order[0]}"
    assert difference(usual, Schedule("other", usual.lanes)) == "names 'sequential' and 'other'"
