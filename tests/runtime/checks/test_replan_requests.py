"""A replan_request for another plan that not all ranks have."""

from __future__ import annotations

import pytest

from penstock.runtime.consistency import ScheduleMismatchError, check_replan_requests
from penstock.runtime.fingerprints import FACTS, REPLAN
from penstock.topology import Control, Layout
from tests.support.ranks import Pools


def facts_of(*requests: str) -> list[float]:
    sums = [0.0] * FACTS
    sums[REPLAN] = float(sum(map(bool, requests)))
    return sums


def told(rank: int, requests: list[str]) -> str:
    layout = Layout(world_size=2, ep_size=2, rank=rank)
    with pytest.raises(ScheduleMismatchError) as caught:
        check_replan_requests(facts_of(*requests), requests[rank], layout, Control(rank, 2))
    return str(caught.value)


@pytest.mark.slow
def test_a_wish_of_one_rank_is_told_on_all(ranks: Pools) -> None:
    first, second = ranks(2).run(told, ["", "experts were frozen"])
    assert first == second and first.startswith("rank 1 needs another plan, since experts were frozen")


@pytest.mark.parametrize("replan_request", ["", "experts were frozen"])
def test_ranks_that_wish_alike_go_on(replan_request: str) -> None:
    check_replan_requests(
        facts_of(replan_request, replan_request),
        replan_request,
        Layout(world_size=2, ep_size=2, rank=0),
        Control(0, 1),
    )
