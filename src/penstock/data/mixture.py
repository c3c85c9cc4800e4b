"""Which text a sample is from: a pure function of its number, so it needs no state and no exchange.

Samples come in cycles of `CYCLE`. In each cycle every text has its share, to the nearest sample, in a random
order that depends on the seed and the number of the cycle alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.apportion import apportion
from penstock.data.order import Indices, Shuffled

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
