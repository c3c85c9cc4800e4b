"""Ranks compare their schedules before they run them."""

from __future__ import annotations

import pytest

from penstock.graph import Lane
from penstock.runtime.agree import check_agreement, first_difference
from penstock.runtime.errors import ScheduleMismatchError
from penstock.schedule import Schedule
from penstock.topology import Control
from tests.steps import example_plan
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow


def swapped(schedule: Schedule, lane: Lane, place: int) -> Schedule:
    """Two neighbours on a lane in the other order."""
    order = list(schedule.lanes[lane])
    order[place], order[place + 1] = order[place + 1], order[place]
    return Schedule(schedule.name, {**schedule.lanes, lane: tuple(order)})


def compare(rank: int, texts: list[str]) -> str:
    try:
        check_agreement(Schedule.parse(texts[rank]), Control(rank, len(texts)))
    except ScheduleMismatchError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize(("lane", "place"), [(Lane.INTER, 3), (Lane.COMPUTE, 0)])
@pytest.mark.parametrize(("world_size", "odd"), [(2, [1]), (2, [0]), (4, [2, 3])])
def test_every_rank_learns_the_first_task_that_differs(
    ranks: Pools, lane: Lane, place: int, world_size: int, odd: list[int]
) -> None:
    usual = example_plan("flowmoe").schedule
    other = swapped(usual, lane, place)
    texts = [(other if rank in odd else usual).text() for rank in range(world_size)]
    if len(odd) > 1:  # the last one differs from the others again, and somewhere else
        texts[odd[-1]] = swapped(usual, lane, place + 3).text()
    answers = ranks(world_size).run(compare, texts)
    assert len(set(answers)) == 1
    first = odd[0] or 1  # the first rank that differs from rank 0
    mine, theirs = (Schedule.parse(texts[rank]).lanes[lane][place] for rank in (0, first))
    assert f"lane {lane}, place {place}: rank 0 runs {mine}, rank {first} runs {theirs}." in answers[0]
    different = odd if 0 not in odd else [rank for rank in range(world_size) if rank not in odd]
    assert f"Ranks that differ from rank 0: {different}" in answers[0]


def test_equal_schedules_agree(ranks: Pools) -> None:
    text = example_plan("flowmoe").schedule.text()
    assert ranks(2).run(compare, [text, text]) == ["agreed", "agreed"]


def test_one_rank_agrees_with_itself() -> None:
    check_agreement(example_plan("flowmoe").schedule, Control(0, 1))


def test_a_missing_task_a_missing_lane_and_another_name_are_differences() -> None:
    usual = example_plan("sequential").schedule
    order = usual.lanes[Lane.INTER]
    shorter = Schedule(usual.name, {**usual.lanes, Lane.INTER: order[:-1]})
    place = len(order) - 1
    expected = f"lane inter, place {place}: rank 0 runs {order[-1]}, rank 5 runs nothing"
    assert first_difference(usual, shorter, 5) == expected
    expected = f"lane inter, place {place}: rank 0 runs nothing, rank 5 runs {order[-1]}"
    assert first_difference(shorter, usual, 5) == expected
    alone = Schedule(usual.name, {Lane.COMPUTE: usual.lanes[Lane.COMPUTE]})
    assert (
        first_difference(alone, usual, 5)
        == f"lane inter, place 0: rank 0 runs nothing, rank 5 runs {order[0]}"
    )
    assert first_difference(usual, Schedule("other", usual.lanes), 5) == "names 'sequential' and 'other'"
