"""Which ranks share a node, from the local ranks that a launcher gave them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.topology import Control, find_node_size
from tests.support.ranks import Pools


class Told(Control):
    """A control whose ranks say what their local ranks are."""

    def __init__(self, places: list[int]) -> None:
        super().__init__(0, 1)
        self.places = places

    def gather(self, mine: Any, purpose: str) -> list[Any]:
        del mine, purpose
        return list(self.places)


@pytest.mark.parametrize(
    ("places", "size"),
    [
        ([0], 1),
        ([0, 1, 2, 3], 4),
        ([0, 1, 0, 1], 2),
        ([0, 0, 0], 1),
        ([0, 1, 0], 0),
        ([0, 1, 0, 1, 2], 0),
        ([0, 0, 1, 1], 0),
        ([1, 0, 1, 0], 0),
    ],
)
def test_equal_runs_of_consecutive_ranks(places: list[int], size: int) -> None:
    assert find_node_size(Told(places), 0) == size


def node_size_here(rank: int, world_size: int, devices: int) -> int:
    return find_node_size(Control(rank, world_size), rank % devices)


@pytest.mark.parametrize("devices", [1, 2])
def test_real_ranks_agree(ranks: Pools, devices: int) -> None:
    assert ranks(2).run(node_size_here, 2, devices) == [devices, devices]
