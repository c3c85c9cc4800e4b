"""Collectives on real ranks: bytes and limits are exact, times are only there."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.collectives import (
    CollectivesResult,
    CollectiveTimes,
    measure_collectives,
    render_collectives,
    shares,
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


def test_the_limit_is_payload_over_the_rate() -> None:
    uplinks = Uplinks(nodes=2, devices=1, inter_rate_bit_per_s=8e6)
    assert uplinks.limit_s(5000) == pytest.approx(5e-3)
    assert uplinks.limit_s(0) is None
    assert Uplinks(nodes=2, devices=1, inter_rate_bit_per_s=None).limit_s(5000) is None


@pytest.mark.soak
def test_small_exchanges_are_repeated(ranks: Pools) -> None:
    counts, *rest = ranks(2).run(measure, 2, 2)[0]
    assert counts.repeats == 16
    assert {times.size_bytes: times.repeats for times in rest} == {64 * KIB: 64, 256 * KIB: 16}


def test_json_and_back(two: CollectivesResult) -> None:
    assert CollectivesResult.from_dict(json.loads(json.dumps(two.to_dict()))) == two


def times(values: Sequence[float], collective: str, size_bytes: int) -> CollectiveTimes:
    return CollectiveTimes(
        collective=collective,
        size_bytes=size_bytes,
        repeats=1,
        times_s={"penstock": tuple(values), "gloo": tuple(2 * value for value in values)},
        traffic=({1: size_bytes // 2}, {0: size_bytes // 2}),
    )


def test_the_table_is_markdown() -> None:
    found = [times([0.00025] * 3, "counts", 256)]
    found += [times([0.0125] * 3, name, 1 << 20) for name in ("all-to-all, even", "all-reduce")]
    text = render_collectives(
        summarise_collectives(found, Uplinks(nodes=2, devices=1, inter_rate_bit_per_s=4e8))
    )
    first, limit, empty, head, rule, *rows = text.splitlines()
    assert first == "2 ranks on 2 nodes, 400 Mbit/s between nodes"
    assert limit.endswith("headers not counted") and empty == "" and set(rule) == set("|-:")
    assert len({line.count("|") for line in (head, rule, *rows)}) == 1
    timed = ["1 MiB", "512 KiB", "10.49", "12.50 [12.50, 12.50]", "0.84", "25.00 [25.00, 25.00]", "0.42"]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        ["counts", "256 B", "128 B", "-", "0.25 [0.25, 0.25]", "-", "0.50 [0.50, 0.50]", "-"],
        ["all-to-all, even", *timed],
        ["all-reduce", *timed],
    ]


def test_a_rank_alone_has_nothing_to_measure() -> None:
    layout = Layout(world_size=1, ep_size=1, rank=0)
    with pytest.raises(ConfigError, match="two ranks"):
        measure_collectives(LocalTransport(), Control(0, 1), layout, LocalTransport())


@given(st.integers(0, 500), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_shares_add_up_and_follow_the_weights(total: int, weights: list[int]) -> None:
    found = shares(total, weights)
    assert sum(found) == total
    for share, weight in zip(found, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) <= 1
