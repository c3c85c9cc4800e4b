"""Which sample comes when, and from which text: pure functions of its number, without state or exchange.

Samples of a mixture come in cycles of `CYCLE`. In each cycle every text has its share, to the nearest sample,
in a random order that depends on the seed and the number of the cycle alone.

Up to `MOST_LISTED` entries an order is a list, drawn at once. A longer order is computed where it is read, by
a Feistel cipher: a keyed function that maps the numbers below a power of four one-to-one onto each other. A
number that it maps past the end is mapped again until it falls below (cycle walking), two or three times on
average.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.apportion import apportion

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

MOST_LISTED = 1 << 22
"""A list of this many entries takes 16 MiB."""

ROUNDS = 8


class Shuffled:
    """The numbers below `count` in an order that depends on the seed alone."""

    def __init__(self, count: int, *seed: int, most_listed: int = MOST_LISTED) -> None:
        self.count, self._seed, self._most_listed = count, seed, most_listed

    @property
    def is_listed(self) -> bool:
        """Whether the order is a list in memory."""
        return self.count <= self._most_listed

    def at(self, places: Indices) -> Indices:
        """Return the numbers at these places, each below `count`."""
        if self.is_listed:
            return self._list[places].astype(np.int64)
        numbers = self._encrypt(places.astype(np.uint64))
        while (outside := numbers >= self.count).any():
            numbers[outside] = self._encrypt(numbers[outside])
        return numbers.astype(np.int64)

    @cached_property
    def _list(self) -> npt.NDArray[np.int32]:
        numbers = np.arange(self.count, dtype=np.int32)
        self._generator.shuffle(numbers)
        return numbers

    @cached_property
    def _keys(self) -> Words:
        return self._generator.integers(0, 2**64, size=ROUNDS, dtype=np.uint64)

    @property
    def _generator(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self._seed))

    def _encrypt(self, numbers: Words) -> Words:
        """Permute the numbers of twice `half` bits."""
        half = np.uint64(max(1, -(-(self.count - 1).bit_length() // 2)))
        mask = np.uint64((1 << int(half)) - 1)
        left, right = numbers >> half, numbers & mask
        for key in self._keys:
            # The finaliser of splitmix64: flipping any bit of a word changes half of its bits on average.
            words = right + key
            words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((words ^ (words >> np.uint64(31))) & mask)
        return (left << half) | right


CYCLE: Final = 1 << 16
STREAM: Final = 1
"""Separates the order of texts from that of samples, which has the same seed."""


class Dealer:
    """Deals samples to texts in proportion to `shares`."""

    def __init__(self, shares: Sequence[float], seed: int) -> None:
        self._seed = seed
        weights = np.array([round(share * 2**32) for share in shares], dtype=np.int64)
        self._due = apportion(weights, CYCLE)
        self._cycle, self._order = -1, (np.empty(0, np.int64), np.empty(0, np.int64))

    def deal(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Return, for samples by number, the text of each, and how many samples of that text precede it."""
        if self._due.size == 1:
            return np.zeros_like(numbers), numbers
        cycles, places = np.divmod(numbers, CYCLE)
        texts, before = np.empty_like(numbers), np.empty_like(numbers)
        for cycle in np.unique(cycles):
            here = cycles == cycle
            order, rank = self._ordered(int(cycle))
            texts[here] = order[places[here]]
            before[here] = cycle * self._due[texts[here]] + rank[places[here]]
        return texts, before

    def until(self, counts: Sequence[int]) -> int:
        """Return how many samples can be dealt before one of the texts, with these counts, is exhausted."""
        if self._due.size == 1:
            return counts[0]
        ends = []
        for text, count in enumerate(counts):
            cycle, rest = divmod(count, int(self._due[text]))
            order, _ = self._ordered(cycle)
            ends.append(cycle * CYCLE + int(np.flatnonzero(order == text)[rest]))
        return min(ends)

    def _ordered(self, cycle: int) -> tuple[Indices, Indices]:
        """Return the text at every place of a cycle, and how many of that text precede it in the cycle."""
        if cycle != self._cycle:
            drawn = Shuffled(CYCLE, self._seed, cycle, STREAM).at(np.arange(CYCLE))
            order = np.searchsorted(np.cumsum(self._due), drawn, side="right").astype(np.int64)
            by_text = np.argsort(order, kind="stable")
            rank = np.empty_like(order)
            rank[by_text] = np.arange(CYCLE) - np.repeat(np.cumsum(self._due) - self._due, self._due)
            self._cycle, self._order = cycle, (order, rank)
        return self._order
