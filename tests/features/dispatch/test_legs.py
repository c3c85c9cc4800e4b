"""Legs of every dispatch, played in one process: rows end where they belong, and come home again."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.dispatch import DISPATCHES, Dispatch, Leg, NodeOnceDispatch, Place
from penstock.features.dispatch.feature import Hierarchical
from penstock.graph import Graph, Lane
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.routing.joined import arrivals, joined_legs, num_sets, sets_of
from penstock.routing.legs import place_in
from penstock.step.passes import Transpose
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import check_picture
from tests.step.support import check_chain, reads
from tests.steps import task_at
from tests.support.draws import draws

BY_RANK = {name: dispatch for name, dispatch in DISPATCHES.items() if not dispatch.joins_rows}
Row = tuple[int, int, int]
"""Source rank, target rank, number."""


def members(group: Axes, place: Place) -> list[int]:
    """Ranks of the group that the rank at `place` is in."""
    size = place.node_size
    if group == Group.NODE:
        return list(range(place.node * size, (place.node + 1) * size))
    return (
        list(range(place.local, place.ep_size, size)) if group == Group.RAIL else list(range(place.ep_size))
    )


def permuted(rows: list[Row], leg: Leg) -> list[Row]:
    ends = np.cumsum([0, *leg.sizes])
    assert ends[-1] == len(rows), "the blocks of a leg are all rows"
    return [row for block in leg.order for row in rows[ends[block] : ends[block + 1]]]


def unpermuted(rows: list[Row], leg: Leg) -> list[Row]:
    numbers = permuted([(i, 0, 0) for i in range(len(rows))], leg)
    found: list[Row] = [(0, 0, 0)] * len(rows)
    for (place, _, _), row in zip(numbers, rows, strict=True):
        found[place] = row
    return found


def exchanged(
    outboxes: Sequence[list[Row]], legs: Sequence[Leg], places: Sequence[Place], back: bool
) -> list[list[Row]]:
    """All ranks' all-to-all at once; what is promised to be received must be what is sent."""
    found: list[list[Row]] = []
    for rank, place in enumerate(places):
        inbox: list[Row] = []
        mine = legs[rank]
        wanted = mine.input_splits if back else mine.output_splits
        for number, peer in enumerate(members(mine.axes, place)):
            splits = legs[peer].output_splits if back else legs[peer].input_splits
            own = place_in(mine.axes, place)
            start = sum(splits[:own])
            part = outboxes[peer][start : start + splits[own]]
            assert len(part) == wanted[number], f"rank {rank} expects {wanted[number]} rows of {peer}"
            inbox += part
        found.append(inbox)
    return found


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    nodes, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = nodes * size
    cells = draw(st.lists(st.integers(0, 3), min_size=ranks * ranks, max_size=ranks * ranks))
    return np.array(cells, dtype=np.int64).reshape(ranks, ranks), size


@pytest.mark.parametrize("dispatch", BY_RANK.values(), ids=BY_RANK.keys())
@draws(60)
@given(case=tables())
def test_rows_arrive_sorted_by_source_and_come_home_as_they_were(
    dispatch: Dispatch,
    case: tuple[np.ndarray, int],
) -> None:
    table, size = case
    places = [Place(rank, len(table), size) for rank in range(len(table))]
    home = [[(s, t, n) for t in range(len(table)) for n in range(table[s, t])] for s in range(len(table))]
    legs = [dispatch.legs(table, place) for place in places]
    rows = home
    for number in range(len(dispatch.hops)):
        now = [mine[number] for mine in legs]
        rows = exchanged(
            [permuted(r, leg) for r, leg in zip(rows, now, strict=True)], now, places, back=False
        )
    for target, held in enumerate(rows):
        assert held == [(s, target, n) for s in range(len(table)) for n in range(table[s, target])]
    for number in reversed(range(len(dispatch.hops))):
        now = [mine[number] for mine in legs]
        received = exchanged(rows, now, places, back=True)
        rows = [unpermuted(r, leg) for r, leg in zip(received, now, strict=True)]
    assert rows == home


@pytest.mark.parametrize("dispatch", DISPATCHES.values(), ids=DISPATCHES.keys())
def test_legs_stay_on_their_lanes(dispatch: Dispatch) -> None:
    """What runs on the lane `intra` never leaves a node; across nodes every byte goes once."""
    ranks, size = 6, 2
    table = np.arange(ranks * ranks, dtype=np.int64).reshape(ranks, ranks) + 1
    crossing = 0
    for rank in range(ranks):
        place = Place(rank, ranks, size)
        for hop, leg in zip(dispatch.hops, dispatch.legs(table, place), strict=True):
            assert hop.axes == leg.axes
            peers = members(leg.axes, place)
            away = [
                n for peer, n in zip(peers, leg.input_splits, strict=True) if peer // size != rank // size
            ]
            crossing += sum(away)
            if hop.lane is Lane.INTRA:
                assert sum(away) == 0, f"{hop.op} of rank {rank}"
    node = np.arange(ranks) // size
    assert crossing == table[node[:, None] != node[None, :]].sum()


def test_messages_between_nodes() -> None:
    """Why there are hierarchical ones: N = 3 nodes of G = 4 send fewer and larger messages."""
    ranks, size = 12, 4
    table = np.ones((ranks, ranks), dtype=np.int64)
    sent: dict[str, list[int]] = {}
    for name, dispatch in DISPATCHES.items():
        sent[name] = []
        for rank in range(ranks):
            place = Place(rank, ranks, size)
            number = [hop.op for hop in dispatch.hops].index(Op.DISPATCH)
            leg = dispatch.legs(table, place)[number]
            peers = members(leg.axes, place)
            sent[name] += [
                n for p, n in zip(peers, leg.input_splits, strict=True) if n and p // size != rank // size
            ]
    assert sent == {
        "flat": [1] * (12 * 8),
        "hierarchical_2d": [4] * (12 * 2),
        "hierarchical_1d": [16] * (3 * 2),
        "node_once": [4] * (12 * 2),
    }


# ---- legs in the step --------------------------------------------------------------------------------------


PLAIN = PlainStep(moe_layers=(True, True)).graph()
CHAINS = {
    "flat": "D X C",
    "hierarchical_1d": "DG D DS X CG C CS",
    "hierarchical_2d": "DG D X C CS",
    "node_once": "D DS X CG C",
}


def rewritten(name: str) -> Graph:
    return Hierarchical(DISPATCHES[name].hops)(PLAIN).check()


def test_the_picture_is_true() -> None:
    check_picture(Hierarchical, PLAIN, rewritten("hierarchical_1d"), layer=1)


@pytest.mark.parametrize("name", CHAINS)
def test_rows_go_from_leg_to_leg_and_gradients_the_same_way_back(name: str) -> None:
    check_chain(Transpose()(rewritten(name)).check(), CHAINS[name].split())


@pytest.mark.parametrize("name", CHAINS)
def test_every_leg_knows_the_route_and_its_group(name: str) -> None:
    graph = rewritten(name)
    for hop in DISPATCHES[name].hops:
        for op in (hop.op, hop.home.op):
            leg = task_at(graph, f"L0.{op}.m0.c0.F")
            assert (leg.lane, leg.axes) == (hop.lane, hop.axes)
            assert reads(graph, str(leg))["route"] == "L0.N.m0.F"


def test_which_legs_between_nodes_follow_rails() -> None:
    axes = {name: task_at(rewritten(name), "L1.C.m0.c0.F").axes for name in CHAINS}
    wide = ("flat", "hierarchical_1d")
    assert axes == {name: Group.EXPERT if name in wide else Group.RAIL for name in CHAINS}


# ---- one copy per node -------------------------------------------------------------------------------------


RowForSet = tuple[int, int, int]
"""Source rank, node, and the number of the set of places there."""


@st.composite
def tables_of_sets(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Rows from every rank for every node and set of places in it, and the ranks of a node."""
    nodes, size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seed, most = draw(st.integers(0, 999)), draw(st.sampled_from([1, 2, 4]))
    shape = (nodes * size, nodes, num_sets(size))
    return np.random.default_rng(seed).integers(0, most, shape), size


def legs_at(table: np.ndarray, place: Place) -> tuple[Leg, Leg]:
    """The legs of one piece on one rank."""
    (legs,) = joined_legs(table[place.rank, :, :, None], table[:, place.node, :, None], place)
    return legs


def came_home(received: list[RowForSet], leg: Leg) -> Counter[int]:
    """How many copies come back of every row that lies as the leg's blocks say."""
    numbers = permuted([(i, 0, 0) for i in range(sum(leg.sizes))], leg)
    assert len(numbers) == len(received)
    return Counter(number for number, _, _ in numbers)


@draws(60)
@given(case=tables_of_sets())
def test_rows_reach_all_ranks_that_they_are_for_and_all_copies_come_back(
    case: tuple[np.ndarray, int],
) -> None:
    table, size = case
    ranks, nodes = len(table), table.shape[1]
    places = [Place(rank, ranks, size) for rank in range(ranks)]
    legs = [legs_at(table, p) for p in places]
    home: list[list[RowForSet]] = [
        [(s, n, each) for n in range(nodes) for each, count in enumerate(table[s, n]) for _ in range(count)]
        for s in range(ranks)
    ]
    rows, held = home, []
    for number in range(2):
        now = [mine[number] for mine in legs]
        outboxes = [permuted(r, leg) for r, leg in zip(rows, now, strict=True)]
        held.append(rows)
        rows = exchanged(outboxes, now, places, back=False)
    for place, arrived in zip(places, rows, strict=True):
        wanted = [
            row for source in home for row in source if row[1] == place.node and row[2] + 1 >> place.local & 1
        ]
        assert sorted(arrived) == sorted(wanted)
        assert arrivals(table[:, place.node, :, None], place).sum() == len(arrived)
        order = [(row[0] % size, row[0] // size, row[2]) for row in arrived]
        assert order == sorted(order), "by the place of who sent it, then its node, then set"
    for place, mine, gateway in zip(places, legs, held[1], strict=True):
        back = exchanged(rows, [each[1] for each in legs], places, back=True)[place.rank]
        copies = came_home(back, mine[1])
        reached = sets_of(size).sum(axis=1)
        assert [copies[i] for i in range(len(gateway))] == [reached[row[2]] for row in gateway]


@draws(60)
@given(nodes=st.integers(1, 4), size=st.integers(1, 4), seed=st.integers(0, 999), most=st.integers(1, 3))
def test_rows_for_one_rank_each_are_rows_for_sets_of_one_place(
    nodes: int, size: int, seed: int, most: int
) -> None:
    ranks = nodes * size
    table = np.random.default_rng(seed).integers(0, most + 1, (ranks, ranks))
    by_set = np.zeros((ranks, nodes, num_sets(size)), dtype=np.int64)
    by_set[:, :, 2 ** np.arange(size) - 1] = table.reshape(ranks, nodes, size)
    for rank in range(ranks):
        place = Place(rank, ranks, size)
        plain, joined = NodeOnceDispatch().legs(table, place), legs_at(by_set, place)
        for one, other in zip(plain, joined, strict=True):
            assert (one.axes, one.input_splits, one.output_splits) == (
                (other.axes, other.input_splits, other.output_splits)
            )
        for legs in (plain, joined):
            assert legs[0].sorted_already
        sent = [
            [leg.sizes[block] for block in leg.order if leg.sizes[block]] for leg in (plain[1], joined[1])
        ]
        assert sent[0] == sent[1]


def test_legs_of_a_thousand_ranks_take_little_memory() -> None:
    ranks = 1024
    table = np.broadcast_to(np.int64(1), (ranks, ranks))
    tracemalloc.start()
    NodeOnceDispatch().legs(table, Place(0, ranks, 8))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20, "every set of every node at every rank would be 255 MiB"
