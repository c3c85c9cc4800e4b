"""Random orders of any length that can be read at any place.

Up to `MOST_LISTED` entries an order is a list, drawn at once. A longer order is computed where it is read, by
a Feistel cipher: a keyed function that maps the numbers below a power of four one-to-one onto each other. A
number that it maps past the end is mapped again until it falls below (cycle walking), two or three times on
average.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

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
        found = self._encrypt(places.astype(np.uint64))
        while (outside := found >= self.count).any():
            found[outside] = self._encrypt(found[outside])
        return found.astype(np.int64)

    @cached_property
    def _list(self) -> npt.NDArray[np.int32]:
        # These are the same draws as for a list of 64 bits per number, which earlier versions used.
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
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << half) | right


def _mixed(words: Words) -> Words:
    """Apply the finaliser of splitmix64: flipping any bit of a word changes half of its bits on average."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
