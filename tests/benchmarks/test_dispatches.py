"""Round trips of dispatches on real ranks: bytes, predictions and choices are exact, times are only there."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.dispatches import (
    FEW_LARGE,
    MANY_SMALL,
    ROW_BYTES,
    SIZES_BYTES,
    DispatchesResult,
    DispatchTimes,
    Trip,
    TripTimes,
    even_sizes,
    leg_models,
    measure_dispatches,
    predict,
    render_dispatches,
    runnable,
    summarise_dispatches,
)
from penstock.config import ConfigError
from penstock.cost import AlphaBeta, ClusterConfig
from penstock.dispatch import DISPATCHES, Leg
from penstock.runtime.transport import Transports, build_transports
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import build_machinery
from tests.support.ranks import Pools

WAYS = [name for name, each in DISPATCHES.items() if not each.joins_rows]
KIB = 1024
SIZES = (4 * KIB, 40 * KIB)
ROUNDS = 2
WORLD = 4
CPU = torch.device("cpu")
NODE = 2
COLUMNS = 100


def layout_of(rank: int, node_size: int = NODE, ep_size: int = WORLD) -> Layout:
    return Layout(world_size=WORLD, ep_size=ep_size, rank=rank, node_size=node_size)


def transports_of(layout: Layout) -> Transports:
    return build_transports(layout, CPU, ParallelConfig())


def measure(rank: int, node_size: int, ep_size: int) -> DispatchTimes:
    machinery = build_machinery(layout_of(rank, node_size, ep_size), CPU, ParallelConfig(), "float32")
    found = measure_dispatches(machinery, sizes_bytes=SIZES, rounds=ROUNDS, links_s=0.1)
    machinery.lanes.close()
    return found


def found_by(ranks: Pools, node_size: int = NODE, ep_size: int = WORLD) -> DispatchTimes:
    first, *others = ranks(WORLD).run(measure, node_size, ep_size)
    assert all(other == first for other in others), "ranks disagree"
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def found(ranks: Pools) -> DispatchTimes:
    """What four ranks on two nodes measured."""
    return found_by(ranks)


def told_by(leg: Leg, layout: Layout, row_bytes: int) -> Counter[int]:
    """Bytes that this rank sends along a leg, out and home, by receiving rank."""
    members = next(group for group in layout.mesh.groups(leg.axes) if layout.rank in group)
    both = zip(members, leg.input_splits, leg.output_splits, strict=True)
    return Counter({peer: (out + home) * row_bytes for peer, out, home in both if peer != layout.rank})


def trips_of(rank: int, name: str, chunks: int) -> tuple[bool, dict[int, int], dict[int, int]]:
    """Whether rows of one size come home as they left; bytes that went, and bytes that the legs tell of."""
    layout = layout_of(rank)
    transports = transports_of(layout)
    trip = Trip.build(name, SIZES[1], chunks, transports, layout)
    trip.rows_RM.copy_(torch.arange(trip.rows_RM.numel()).view_as(trip.rows_RM) + 1e5 * rank)
    home = trip.run()
    told = sum((told_by(leg, layout, ROW_BYTES) for leg, _ in trip.legs), Counter())
    sent = dict(+transports.traffic)
    return torch.equal(home, trip.rows_RM), sent, {peer: chunks * size for peer, size in (+told).items()}


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [FEW_LARGE, MANY_SMALL])
@pytest.mark.parametrize("name", WAYS)
def test_rows_come_home_and_the_bytes_are_those_of_the_legs(ranks: Pools, name: str, chunks: int) -> None:
    for same, sent, told in ranks(WORLD).run(trips_of, name, chunks):
        assert same and sent and sent == told


@pytest.mark.slow
def test_every_dispatch_is_measured_at_every_size(found: DispatchTimes) -> None:
    cases = [(chunks, size) for chunks in (FEW_LARGE, MANY_SMALL) for size in (4 * KIB, 40 * KIB)]
    assert [(trip.chunks, trip.size_bytes) for trip in found.trips] == cases
    for trip in found.trips:
        assert list(trip.times_s) == list(trip.traffic) == list(found.models) == list(WAYS)
        assert all(len(times) == ROUNDS and min(times) > 0 for times in trip.times_s.values())
    for row in summarise_dispatches(found, None).rows:
        assert all(seconds > 0 for seconds in row.predicted_s.values())
        assert row.predicted_s[row.auto] == min(row.predicted_s.values())
        assert row.auto_ratio >= 1


@pytest.mark.slow
def test_the_bytes_of_the_measured_trips(found: DispatchTimes) -> None:
    for trip in found.trips:
        share = trip.size_bytes // WORLD  # for each rank
        flat = {rank: {peer: 2 * share for peer in range(WORLD) if peer != rank} for rank in range(WORLD)}
        assert trip.traffic["flat"] == tuple(flat[rank] for rank in range(WORLD))
        # Half of the rows to the neighbour, then half along the rail, and home again.
        to = {0: (1, 2), 1: (0, 3), 2: (3, 0), 3: (2, 1)}
        assert [set(sent) for sent in trip.traffic["hierarchical_2d"]] == [set(to[rank]) for rank in to]
        assert all(size == 4 * share for sent in trip.traffic["hierarchical_2d"] for size in sent.values())
        # All rows of a rank to the first one of its node and as many back, half of a node's rows across.
        inside, across = 8 * share, 8 * share
        leaders = ({1: inside, 2: across}, {0: inside}, {3: inside, 0: across}, {2: inside})
        assert trip.traffic["hierarchical_1d"] == leaders


@pytest.mark.soak
@pytest.mark.slow
def test_what_must_cross_is_half_of_the_rows_of_a_node(found: DispatchTimes) -> None:
    result = summarise_dispatches(found, 8e6)
    assert (result.ranks, result.nodes) == (4, 2)
    for row in result.rows:
        # Half of the rows of two ranks, out and home.
        assert row.wire_bytes == 2 * row.size_bytes and row.limit_s == row.wire_bytes / 1e6
        assert row.efficiency("flat") == row.limit_s / row.times_s["flat"].median


@pytest.mark.slow
@pytest.mark.parametrize(("node_size", "ep_size"), [(0, 4), pytest.param(2, 2, marks=pytest.mark.soak)])
def test_without_nodes_there_is_one_dispatch(ranks: Pools, node_size: int, ep_size: int) -> None:
    result = summarise_dispatches(found_by(ranks, node_size, ep_size), 8e6)
    for row in result.rows:
        assert list(row.times_s) == ["flat"] and row.wire_bytes == 0 and row.limit_s is None
        assert row.fastest == row.auto == "flat" and row.auto_ratio == 1
    assert "nothing crosses" in render_dispatches(result)


def test_which_dispatches_a_layout_can_run() -> None:
    assert runnable(layout_of(0)) == tuple(WAYS)
    assert runnable(layout_of(0, node_size=0)) == runnable(layout_of(0, ep_size=2)) == ("flat",)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 16, 64])
def test_sizes_are_even(ranks: int) -> None:
    sizes = even_sizes(SIZES_BYTES, ranks)
    assert all(size > 0 and size % (ranks * ROW_BYTES * MANY_SMALL) == 0 for size in sizes)
    assert len(set(sizes)) == len(sizes) and list(sizes) == sorted(sizes)
    assert sizes == SIZES_BYTES if ranks in (2, 4, 16) else sizes[-1] <= SIZES_BYTES[-1]


def test_a_prediction_is_the_sum_of_the_legs() -> None:
    layout = layout_of(0)
    cluster = ClusterConfig(
        link_latency_s=3e-3, link_bytes_per_s=1e6, intra_latency_s=1e-3, intra_bytes_per_s=4e6
    )
    models = leg_models("hierarchical_2d", cluster, layout)
    assert list(models) == ["DG", "D", "C", "CS"]
    # Half of the rows inside the node, half of them across, out and home.
    once_s = 2 * (1e-3 + 500e3 / 4e6 + 3e-3 + 500e3 / 1e6)
    assert predict(models, 1_000_000, 1) == pytest.approx(once_s)
    assert predict(models, 1_000_000, 8) == pytest.approx(once_s + 7 * 2 * 4e-3), (
        "start-ups, seven times more"
    )


def test_nothing_is_measured_where_a_rank_is_alone() -> None:
    layout = Layout(world_size=1, ep_size=1, rank=0)
    machinery = build_machinery(layout, CPU, ParallelConfig(), "float32")
    with pytest.raises(ConfigError, match="two ranks"):
        measure_dispatches(machinery)
    two = replace(machinery, layout=Layout(world_size=2, ep_size=2, rank=0))
    with pytest.raises(ConfigError, match="rounds"):
        measure_dispatches(two, rounds=0)


# ---- made-up numbers ---------------------------------------------------------------------------------------


def trip(size_bytes: int, chunks: int, **times_s: float) -> TripTimes:
    one_way: tuple[dict[int, int], ...] = ({2: size_bytes}, {}, {0: size_bytes}, {})
    return TripTimes(
        size_bytes=size_bytes,
        chunks=chunks,
        repeats=1,
        times_s={name: (seconds,) * 3 for name, seconds in times_s.items()},
        traffic=dict.fromkeys(times_s, one_way),
    )


def made_up(inter_rate_bit_per_s: float | None = 8e6) -> DispatchesResult:
    """By the models flat takes 1 ms and 1 s per MB of rows; 1D always 0.5 s; 2D 10 ms and 0.5 s per MB."""
    numbers = {"flat": (1e-3, 1e-6), "hierarchical_1d": (0.5, 0.0), "hierarchical_2d": (1e-2, 5e-7)}
    models = {name: {"D": AlphaBeta(alpha_s=a, beta_s_per_byte=b)} for name, (a, b) in numbers.items()}
    trips = (
        trip(10_000, FEW_LARGE, flat=0.012, hierarchical_1d=0.5, hierarchical_2d=0.016),
        trip(1_000_000, FEW_LARGE, flat=1.25, hierarchical_1d=0.625, hierarchical_2d=1.0),
        trip(10_000, MANY_SMALL, flat=0.02, hierarchical_1d=4.0, hierarchical_2d=0.016),
        trip(1_000_000, MANY_SMALL, flat=2.0, hierarchical_1d=4.0, hierarchical_2d=1.5),
    )
    return summarise_dispatches(
        DispatchTimes(ranks=4, devices=2, models=models, trips=trips), inter_rate_bit_per_s
    )


def test_the_choice_is_the_least_prediction_and_is_compared_with_the_fastest() -> None:
    rows = made_up().rows
    assert [row.fastest for row in rows] == ["flat", "hierarchical_1d", "hierarchical_2d", "hierarchical_2d"]
    assert [row.auto for row in rows] == ["flat", "hierarchical_1d", "flat", "hierarchical_2d"]
    assert [row.auto_ratio for row in rows] == [1, 1, pytest.approx(1.25), 1]
    assert rows[2].predicted_s == pytest.approx(
        {"flat": 0.018, "hierarchical_1d": 4.0, "hierarchical_2d": 0.085}
    )


def test_the_limit_is_what_crosses_over_the_rate() -> None:
    large = made_up().rows[1]
    assert large.wire_bytes == 1_000_000 and large.limit_s == pytest.approx(1.0)
    assert large.efficiency("flat") == pytest.approx(0.8)
    assert made_up(None).rows[1].limit_s is None and made_up(None).rows[1].efficiency("flat") is None


def test_json_and_back() -> None:
    result = made_up()
    plain = json.loads(json.dumps(result.to_dict()))
    assert DispatchesResult.from_dict(plain) == result
    assert list(plain) == ["ranks", "nodes", "inter_rate_bit_per_s", "models", "dispatches"]
    assert plain["models"]["flat"]["D"] == {"alpha_s": 1e-3, "beta_s_per_byte": 1e-6}
    row = plain["dispatches"][2]
    assert (row["size_bytes"], row["chunks"], row["wire_bytes"]) == (10_000, 8, 10_000)
    assert (row["fastest"], row["auto"]) == ("hierarchical_2d", "flat")
    assert row["auto_ratio"] == pytest.approx(1.25) and row["limit_s"] == pytest.approx(0.01)
    for key in ("times_s", "predicted_s", "efficiency"):
        assert list(row[key]) == list(WAYS)
    assert set(row["times_s"]["flat"]) == {"median", "low", "high"}


def test_both_tables_are_markdown_with_winner_and_choice() -> None:
    text = render_dispatches(made_up())
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) == 2 * 4 and len({line.count("|") for line in tables}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]
    assert cells[0] == cells[4] == ["per rank", *WAYS, "efficiency", "auto/best"]
    assert cells[2] == [
        "9.766 KiB",
        "*12.0 ±  0% >11.0",
        "500 ±  0%   500",
        "16.0 ±  0%  15.0",
        "0.83",
        "1.00",
    ]
    assert cells[6] == [
        "9.766 KiB",
        "20.0 ±  0% >18.0",
        "4000 ±  0%  4000",
        "*16.0 ±  0%  85.0",
        "0.62",
        "1.25",
    ]
    assert text.splitlines()[0] == "4 ranks on 2 nodes, 8 Mbit/s between nodes"
    assert text.splitlines()[-3:] == [
        "fastest: flat in 1, hierarchical_1d in 1, hierarchical_2d in 2 of 4",
        "auto: the fastest in 3 of 4, at worst 1.25 times its time",
        "physical limit: a MiB of rows sends 1 MiB over a node's link (dispatch and combine): 1049 ms",
    ]


@pytest.mark.parametrize("rate", [8e6, None])
def test_the_text_fits_a_terminal(rate: float | None) -> None:
    result = made_up(rate)
    slow = tuple(
        replace(row, predicted_s=dict.fromkeys(row.predicted_s, 9.9), size_bytes=1023 * KIB)
        for row in result.rows
    )
    for text in (render_dispatches(result), render_dispatches(replace(result, rows=slow))):
        assert all(len(line) <= COLUMNS for line in text.splitlines()), text
        assert all(name in text for name in WAYS)
    assert ("unknown rate" in render_dispatches(result)) == (rate is None)
