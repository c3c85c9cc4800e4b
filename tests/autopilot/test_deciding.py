"""What rank 0 decides reaches all ranks, however long it takes."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import TypeVar
from unittest import mock

from penstock.autopilot import deciding
from penstock.autopilot.deciding import Beat, decided, decided_slowly
from penstock.config import ConfigError
from penstock.topology import Control
from tests.support.ranks import Pools

T = TypeVar("T")

TIMEOUT_S = 1.0
"""How long ranks would wait for each other, on a clock that a decision moves."""


class TimedControl(Control):
    """Notes when ranks have met, on a clock that stands still unless something moves it."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.now_s = 0.0
        self.met_s = [0.0]

    def gather(self, mine: T, purpose: str) -> list[T]:
        self.met_s.append(self.now_s)
        return super().gather(mine, purpose)


def choose_slowly(rank: int, world_size: int) -> tuple[str, int, list[float]]:
    """An answer that takes three times as long as ranks wait, how often it was looked for, and meetings."""
    asked, control = 0, TimedControl(rank, world_size)

    def decide(beat: Beat) -> str:
        nonlocal asked
        asked += 1
        for _ in range(60):
            control.now_s += TIMEOUT_S / 20
            beat()
        return "a plan"

    with mock.patch.object(deciding, "time", SimpleNamespace(monotonic=lambda: control.now_s)):
        return decided_slowly(control, decide, "choosing a plan", TIMEOUT_S), asked, control.met_s


def refuse(rank: int, world_size: int) -> str:
    def decide(beat: Beat) -> str:
        beat()
        raise ConfigError("memory", 1, "no plan fits", "Use more.")

    try:
        return decided_slowly(Control(rank, world_size), decide, "choosing a plan", TIMEOUT_S)
    except ConfigError as error:
        return str(error)


def test_ranks_wait_for_a_search_that_outlasts_their_timeout(ranks: Pools) -> None:
    """Rank 0 meets the others often enough, and they take none of these meetings for the answer."""
    first, second = ranks(2).run(choose_slowly, 2)
    assert first[:2] == ("a plan", 1) and second[:2] == ("a plan", 0)
    met_s = first[2]
    assert len(met_s) == len(second[2]) and met_s[-1] > 2 * TIMEOUT_S
    assert max(later - earlier for earlier, later in pairwise(met_s)) < TIMEOUT_S / 2


def test_what_stops_a_decision_is_raised_everywhere(ranks: Pools) -> None:
    first, second = ranks(2).run(refuse, 2)
    assert first == second and "no plan fits" in first


def test_a_rank_alone_decides_for_itself() -> None:
    assert decided(Control(0, 1), lambda: 7, "nothing") == 7
    assert decided_slowly(Control(0, 1), lambda _: 8, "nothing", 0.001) == 8
    assert "no plan fits" in refuse(0, 1)
