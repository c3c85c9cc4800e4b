"""Legs of every dispatch, played in one process: rows end where they belong, and come home again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.dispatch import DISPATCHES, Dispatch, Leg, Place
from penstock.graph import Lane
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.routing.legs import place_in
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
