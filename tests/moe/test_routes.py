"""Row counts of transfers: what one rank sends is what the other receives, by every dispatch."""

from __future__ import annotations

from math import lcm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.apportion import Counts
from penstock.features.dispatch import DISPATCHES, Place
from penstock.moe import RouteMaker

BY_RANK = [name for name, dispatch in DISPATCHES.items() if not dispatch.joins_rows]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Counts, int]:
    """Counts [source, target, chunk, local expert], and the ranks of a node."""
    nodes, size = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    shape = (nodes * size, nodes * size, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    seed, most = draw(st.integers(0, 99)), draw(st.sampled_from([1, 2, 4]))
    return np.random.default_rng(seed).integers(0, most, shape), size


@pytest.mark.parametrize("name", BY_RANK)
@given(case=tables())
def test_exchanged_counts_agree_between_ranks(name: str, case: tuple[Counts, int]) -> None:
    """Simulates the exchange: rank r gets [source][chunk][local expert] where source sent to r."""
    table, size = case
    ranks, dispatch = len(table), DISPATCHES[name]
    makers = [RouteMaker(dispatch, Place(rank, ranks, size)) for rank in range(ranks)]
    routes = [maker.from_table(table) for maker in makers]
    for mine in range(ranks):
        for c, chunk in enumerate(routes[mine].slices):
            assert list(chunk.sent) == table[mine, :, c].tolist()
            assert chunk.rows_sent == tuple(table[mine, :, c].sum(axis=1))
            for peer in range(ranks):
                assert chunk.rows_sent[peer] == routes[peer].slices[c].rows_received[mine]
                assert chunk.sent[peer] == routes[peer].slices[c].received[mine]
        if not dispatch.needs_table:  # its own share says as much
            assert makers[mine].from_pair(table[mine], table[:, mine]) == routes[mine]


@pytest.mark.parametrize("name", BY_RANK)
@given(case=tables(), degrees=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_a_chunk_carries_what_its_slices_have(
    name: str, case: tuple[Counts, int], degrees: tuple[int, int]
) -> None:
    table, size = np.tile(case[0][:, :, :1], (1, 1, lcm(*degrees), 1)), case[1]
    table += np.arange(table.size).reshape(table.shape) % 3  # no two slices alike
    place = Place(len(table) - 1, len(table), size)
    maker = RouteMaker(DISPATCHES[name], place)
    routes = maker.from_table(table, degrees)
    assert [len(routes.cuts[n]) for n in degrees] == list(degrees)
    for count in degrees:
        chunks = routes.cuts[count]
        each = len(routes.slices) // len(chunks)
        for c, legs in enumerate(chunks):
            held = routes.slices[c * each : (c + 1) * each]
            whole = table[:, :, c * each : (c + 1) * each].sum(axis=(2, 3))
            assert legs == (maker.dispatch.legs(whole, place) if len(table) > 1 else ())
            if legs:
                assert sum(legs[0].sizes) == sum(sum(s.rows_sent) for s in held)
                assert sum(legs[-1].output_splits) == sum(sum(s.rows_received) for s in held)
            if not maker.needs_table and legs:
                assert legs[0].input_splits == tuple(map(sum, zip(*(s.rows_sent for s in held), strict=True)))
    assert maker.from_table(table) == maker.from_table(table, (len(routes.slices),) * 2)
