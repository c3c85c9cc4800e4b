"""Traffic in the background on real ranks: equal work everywhere, and nothing is left of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from penstock.mesh import Group
from penstock.runtime.transport import GlooTransport
from penstock.runtime.transport.load import SIZE_BYTES, TIMED, UNTIMED, Load
from penstock.topology import Control, Layout, lane_groups
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ran:
    """What a load left on one rank. afterwards: rows that came from each rank in an exchange behind it."""

    slowed: float
    sent: Counter[int]
    afterwards: list[float]
    total: float


def transport_of(rank: int, world_size: int) -> GlooTransport:
    layout = Layout(world_size=world_size, ep_size=world_size, rank=rank)
    return GlooTransport(lambda: lane_groups(layout, TIMEOUT_S))


def run_load(rank: int, world_size: int, enough_for_s: float, busy: bool) -> Ran:
    transport, control = transport_of(rank, world_size), Control(rank, world_size)
    load = Load(transport, control)
    load.start(enough_for_s)
    if busy and rank == 0:  # one rank computes for longer than the others
        square = torch.ones(256, 256)
        for _ in range(20):
            square = (square @ square).clamp(max=1.0)
    slowed, sent = load.finish(), transport.traffic.copy()
    rows = torch.full((world_size, 1), float(rank))
    afterwards = transport.all_to_all(rows, [1] * world_size, [1] * world_size)
    total = torch.ones(3)
    transport.all_reduce(total, Group.WORLD)
    return Ran(slowed, sent, afterwards.flatten().tolist(), float(total[0]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_exchange_the_same_number_of_times(ranks: Pools, world_size: int) -> None:
    found = ranks(world_size).run(run_load, world_size, 0.05, True)
    rows = SIZE_BYTES // (4 * 512 * world_size)
    one_exchange_bytes = rows * 512 * 4
    counts = {size // one_exchange_bytes for ran in found for size in ran.sent.values()}
    assert len(counts) == 1, "ranks sent different amounts"
    assert counts.pop() > UNTIMED + TIMED, "nothing ran in the background"
    for rank, ran in enumerate(found):
        assert ran.sent.keys() == set(range(world_size)) - {rank}
        assert all(size % one_exchange_bytes == 0 for size in ran.sent.values())


def test_the_slowdown_is_the_same_number_everywhere_and_no_speed_up(ranks: Pools) -> None:
    first, second = ranks(2).run(run_load, 2, 0.02, False)
    assert first.slowed >= 1.0
    # Both take the slowest rank's times, of the exchanges alone and of those in the background.
    assert first.slowed == second.slowed


def test_the_transport_is_as_before(ranks: Pools) -> None:
    for ran in ranks(2).run(run_load, 2, 0.02, False):
        assert ran.afterwards == [0.0, 1.0] and ran.total == 2.0


def run_two_loads(rank: int, world_size: int) -> list[float]:
    transport, control = transport_of(rank, world_size), Control(rank, world_size)
    found = []
    for _ in range(2):
        load = Load(transport, control)
        load.start(0.01)
        found.append(load.finish())
    return found


def test_one_transport_carries_one_load_after_another(ranks: Pools) -> None:
    first, second = ranks(2).run(run_two_loads, 2)
    assert first == second and min(first) >= 1.0


def unstarted(rank: int) -> str:
    try:
        Load(transport_of(rank, 2), Control(rank, 2)).finish()
    except AssertionError as error:
        return str(error)
    return "nothing"


def test_what_has_not_started_cannot_finish(ranks: Pools) -> None:
    assert ranks(2).run(unstarted) == ["start comes first"] * 2
