"""What rank 0 decides reaches all ranks, however long it takes."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from penstock.autopilot.deciding import Beat, decided, decided_slowly
from penstock.config import ConfigError
from penstock.topology import Control
from tests.support.ranks import Pools

PATIENCE_S = 1.0
"""How long these ranks wait for each other."""


class Impatient(Control):
    """All ranks, in a group of its own that waits for PATIENCE_S."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._group = dist.new_group(timeout=timedelta(seconds=PATIENCE_S))


def choose_slowly(rank: int, world_size: int) -> tuple[str, int]:
    """An answer that takes three times as long as anybody waits, and how often it was looked for."""
    asked = 0

    def decide(beat: Beat) -> str:
        nonlocal asked
        asked += 1
        end = time.monotonic() + 3 * PATIENCE_S
        while time.monotonic() < end:
            time.sleep(PATIENCE_S / 20)
            beat()
        return "a plan"

    return decided_slowly(Impatient(rank, world_size), decide, "choosing a plan", PATIENCE_S), asked


def refuse(rank: int, world_size: int) -> str:
    def decide(beat: Beat) -> str:
        beat()
        raise ConfigError("memory", 1, "no plan fits", "Use more.")

    try:
        return decided_slowly(Control(rank, world_size), decide, "choosing a plan", PATIENCE_S)
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
def test_ranks_wait_for_a_search_that_outlasts_their_patience(ranks: Pools) -> None:
    assert ranks(2).run(choose_slowly, 2) == [("a plan", 1), ("a plan", 0)]


def test_what_stops_a_decision_is_raised_everywhere(ranks: Pools) -> None:
    first, second = ranks(2).run(refuse, 2)
    assert first == second and "no plan fits" in first


def test_a_rank_alone_decides_for_itself() -> None:
    assert decided(Control(0, 1), lambda: 7, "nothing") == 7
    assert decided_slowly(Control(0, 1), lambda _: 8, "nothing", 0.001) == 8
    assert "no plan fits" in refuse(0, 1)
