"""Random orders that are computed where they are read."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.order import Shuffled


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 9))
def test_every_number_stands_in_one_place(count: int, seed: int, epoch: int) -> None:
    for most_listed in (0, count):
        found = Shuffled(count, seed, epoch, most_listed=most_listed).at(np.arange(count))
        assert sorted(found.tolist()) == list(range(count))


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_a_list_is_the_permutation_that_numpy_draws(count: int, seed: int) -> None:
    drawn = np.random.Generator(np.random.PCG64((seed, 3))).permutation(np.arange(count, dtype=np.int64))
    assert Shuffled(count, seed, 3).at(np.arange(count)).tolist() == drawn.tolist()


def test_a_computed_order_is_as_random_as_a_drawn_one() -> None:
    """Where numbers land, and how far neighbours are apart, is uniform: chi-square over 64 cells."""
    count, cells = 1 << 16, 64
    found = Shuffled(count, 5, 0, most_listed=0).at(np.arange(count))
    for values in (found[: count // 4], np.diff(found) % count):
        seen = np.bincount(values * cells // count, minlength=cells)
        expected = len(values) / cells
        assert ((seen - expected) ** 2 / expected).sum() < 120  # one of 100,000 random orders is above


def test_epochs_and_seeds_differ_and_repeat() -> None:
    places = np.arange(1000)
    orders = [Shuffled(10**12, *seed).at(places).tolist() for seed in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert max(map(max, orders)) < 10**12
