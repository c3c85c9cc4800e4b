"""One copy per node, played in one process: rows reach all ranks that they are for; all copies come back."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.dispatch import Leg, NodeOnceDispatch, Place
from penstock.routing.joined import arrivals, joined_legs, num_sets, sets_of
from tests.features.dispatch.test_legs import exchanged, permuted
from tests.support.draws import draws

Row = tuple[int, int, int]
"""Source rank, node, and the number of the set of places there."""


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Rows from every rank for every node and set of places in it, and the ranks of a node."""
    nodes, size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seed, most = draw(st.integers(0, 999)), draw(st.sampled_from([1, 2, 4]))
    shape = (nodes * size, nodes, num_sets(size))
    return np.random.default_rng(seed).integers(0, most, shape), size


def legs_at(table: np.ndarray, place: Place) -> tuple[Leg, Leg]:
    """The legs of one piece on one rank."""
    (legs,) = joined_legs(table[place.rank, :, :, None], table[:, place.node, :, None], place)
    return legs


def came_home(received: list[Row], leg: Leg) -> Counter[int]:
    """How many copies come back of every row that lies as the leg's blocks say."""
    numbers = permuted([(i, 0, 0) for i in range(sum(leg.sizes))], leg)
    assert len(numbers) == len(received)
    return Counter(number for number, _, _ in numbers)


@draws(60)
@given(case=tables())
def test_rows_reach_all_ranks_that_they_are_for_and_all_copies_come_back(
    case: tuple[np.ndarray, int],
) -> None:
    table, size = case
    ranks, nodes = len(table), table.shape[1]
    places = [Place(rank, ranks, size) for rank in range(ranks)]
    legs = [legs_at(table, p) for p in places]
    home: list[list[Row]] = [
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
