"""A wish for another plan that not all ranks have."""

from __future__ import annotations

import pytest

from penstock.runtime.checks.wishes import check_wishes
from penstock.runtime.errors import ScheduleMismatchError
from penstock.runtime.fingerprints.marks import FACTS, WISH
from penstock.topology import Control, Layout
from tests.support.ranks import Pools


def facts_of(*wishes: str) -> list[float]:
    sums = [0.0] * FACTS
    sums[WISH] = float(sum(map(bool, wishes)))
    return sums


def told(rank: int, wishes: list[str]) -> str:
    layout = Layout(world_size=2, ep_size=2, rank=rank)
    with pytest.raises(ScheduleMismatchError) as caught:
        check_wishes(facts_of(*wishes), wishes[rank], layout, Control(rank, 2))
    return str(caught.value)


@pytest.mark.slow
def test_a_wish_of_one_rank_is_told_on_all(ranks: Pools) -> None:
    first, second = ranks(2).run(told, ["", "experts were frozen"])
    assert first == second and first.startswith("rank 1 needs another plan, since experts were frozen")


@pytest.mark.parametrize("wish", ["", "experts were frozen"])
def test_ranks_that_wish_alike_go_on(wish: str) -> None:
    check_wishes(facts_of(wish, wish), wish, Layout(world_size=2, ep_size=2, rank=0), Control(0, 1))
