"""Collectives on real ranks: bytes and limits are exact, times are only there."""

from __future__ import annotations

import pytest

from benchmarks.collectives import (
    CollectivesResult,
    CollectiveTimes,
    measure_collectives,
    render_collectives,
    summarise_collectives,
)
from benchmarks.peers.shipped import ShippedTransport
from benchmarks.uplinks import Uplinks
from penstock.config import ConfigError
from penstock.runtime.groups import LocalTransport
from penstock.runtime.transport import GlooTransport
from penstock.topology import Control, Layout, lane_groups
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

KIB = 1024
SIZES_BYTES = (64 * KIB, 256 * KIB)
ROUNDS = 3
TIMEOUT_S = 60.0


def measure(rank: int, world_size: int, ep_size: int) -> tuple[CollectiveTimes, ...]:
    layout = Layout(world_size=world_size, ep_size=ep_size, rank=rank)
    transport = GlooTransport(lambda: lane_groups(layout, TIMEOUT_S))
    shipped = ShippedTransport(lambda: lane_groups(layout, TIMEOUT_S))
    control = Control(rank, world_size)
    return measure_collectives(transport, control, layout, shipped, sizes_bytes=SIZES_BYTES, rounds=ROUNDS)


def result(ranks: Pools, world_size: int, ep_size: int, nodes: int) -> CollectivesResult:
    first, *others = ranks(world_size).run(measure, world_size, ep_size)
    assert all(other == first for other in others), "ranks disagree"
    uplinks = Uplinks(nodes=nodes, devices=world_size // nodes, inter_rate_bit_per_s=8e6)
    return summarise_collectives(first, uplinks)


@pytest.fixture(scope="module")
def two(ranks: Pools) -> CollectivesResult:
    """What two ranks on two nodes measured."""
    return result(ranks, 2, 2, nodes=2)


def wire_kib(found: CollectivesResult, size_bytes: int) -> dict[str, float]:
    return {row.collective: row.wire_bytes / KIB for row in found.rows if row.size_bytes == size_bytes}


def test_every_collective_is_there_at_every_size(two: CollectivesResult) -> None:
    names = ["all-to-all, even", "all-to-all, uneven", "all-reduce"]
    assert [row.collective for row in two.rows] == ["counts", *names, *names]
    for row in two.rows:
        assert set(row.times_s) == {"penstock", "gloo"}
        for spread in row.times_s.values():
            assert 0 < spread.low <= spread.median <= spread.high
    assert render_collectives(two).startswith("2 ranks on 2 nodes, 8 Mbit/s between nodes\n")


def test_one_device_per_node_sends_all_but_its_own_share(two: CollectivesResult) -> None:
    # Uneven: two thirds of every rank's rows go to rank 0, so rank 1 sends that much.
    wanted = {"all-to-all, even": 128, "all-to-all, uneven": 171, "all-reduce": 256}
    assert wire_kib(two, 256 * KIB) == wanted


@pytest.mark.soak
def test_devices_of_a_node_share_its_uplink(ranks: Pools) -> None:
    found = result(ranks, 4, 4, nodes=2)
    # Even: two devices send half of their 256 KiB each. A ring leaves a node once: 2 * 3 / 4 of the buffer.
    # Uneven: 4 and 3 tenths of two buffers go to the first node (102 and 77 rows after rounding).
    wanted = {"all-to-all, even": 256, "all-to-all, uneven": 2 * (102 + 77), "all-reduce": 384}
    assert wire_kib(found, 256 * KIB) == wanted


@pytest.mark.soak
def test_nothing_crosses_where_experts_are_spread_inside_a_node(ranks: Pools) -> None:
    found = result(ranks, 4, 2, nodes=2)
    even = next(row for row in found.rows if row.collective == "all-to-all, even")
    assert even.wire_bytes == 0 and even.limit_s is None and even.efficiency("penstock") is None


def test_the_limit_is_payload_over_rate_and_latency_has_none(two: CollectivesResult) -> None:
    counts, even = two.rows[0], two.rows[1]
    assert counts.limit_s is None and counts.efficiency("gloo") is None
    assert even.limit_s == even.wire_bytes / 1e6
    assert even.efficiency("gloo") == even.limit_s / even.times_s["gloo"].median


def test_a_rank_alone_has_nothing_to_measure() -> None:
    layout = Layout(world_size=1, ep_size=1, rank=0)
    with pytest.raises(ConfigError, match="two ranks"):
        measure_collectives(LocalTransport(), Control(0, 1), layout, LocalTransport())
