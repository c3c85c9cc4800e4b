"""What rank 0 decides reaches all ranks, however long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

import pytest

from penstock.config import ConfigError
from penstock.topology import Control
from tests.support.ranks import Pools

MEETINGS = 5
"""So often ranks meet before there is a decision."""


class CountingControl(Control):
    """Notes that ranks have met; a decision waits until they have done so often enough."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.met, self.often = 0, Event()

    def largest(self, mine: Sequence[float], purpose: str) -> list[float]:
        found = super().largest(mine, purpose)
        self.met += 1
        if self.met == MEETINGS:
            self.often.set()
        return found


def choose_slowly(rank: int, world_size: int) -> tuple[str, int, int]:
    """An answer that takes its time, how often it was looked for, and how often ranks met."""
    asked, control = 0, CountingControl(rank, world_size)

    def decide() -> str:
        nonlocal asked
        asked += 1
        assert control.often.wait(60), "ranks do not hear of a decision that is still being made"
        return "a plan"

    return control.decided(decide, "choosing a plan", slowly=True), asked, control.met


def refuse(rank: int, world_size: int) -> str:
    def decide() -> str:
        raise ConfigError("memory", 1, "no plan fits", "Use more.")

    try:
        return Control(rank, world_size).decided(decide, "choosing a plan", slowly=True)
    except ConfigError as error:
        return str(error)


def test_ranks_wait_for_a_search_that_outlasts_their_timeout(ranks: Pools) -> None:
    """Rank 0 meets the others often enough, and they take none of these meetings for the answer."""
    first, second = ranks(2).run(choose_slowly, 2)
    assert first[:2] == ("a plan", 1) and second[:2] == ("a plan", 0)
    assert first[2] == second[2] > MEETINGS


def test_what_stops_a_decision_is_raised_everywhere(ranks: Pools) -> None:
    first, second = ranks(2).run(refuse, 2)
    assert first == second and "no plan fits" in first


def fail_first(rank: int, world_size: int) -> str:
    """What a rank hears whose work would go on, after another one's has failed."""
    given_up = Event()

    def work() -> None:
        if rank == 1:
            raise ConfigError("data.path", "a.txt", "line 7 is no JSON", "Mend it.")
        assert given_up.wait(60), "it is still wanted"

    try:
        Control(rank, world_size).agreed(work, "preparing", slowly=True, given_up=given_up)
    except ConfigError as error:
        return error.why
    return ""


def test_slow_work_ends_where_that_of_another_rank_has_failed(ranks: Pools) -> None:
    assert ranks(2).run(fail_first, 2) == ["on rank 1, line 7 is no JSON"] * 2


def test_a_rank_alone_decides_for_itself() -> None:
    assert Control(0, 1).decided(lambda: 7, "nothing") == 7
    assert Control(0, 1).decided(lambda: 8, "nothing", slowly=True) == 8
    assert "no plan fits" in refuse(0, 1)


def test_a_defect_of_a_decision_is_raised_where_it_is_waited_for() -> None:
    with pytest.raises(ZeroDivisionError):
        Control(0, 1).decided(lambda: 1 // 0, "nothing", slowly=True)
