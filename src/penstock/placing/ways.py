"""Copies of experts on their way to homes, counted by link: one more is priced without a recount."""

from __future__ import annotations

from collections import Counter

from penstock.placing.integers import Ints
from penstock.placing.problem import Links


class Ways:
    """The load of links. copies: by owner and home, [P, P]."""

    def __init__(self, links: Links, copies: Ints) -> None:
        self._links, self._busiest_s = links, links.seconds(copies)
        self._carried: Counter[tuple[str, bool, int]] = Counter()
        for owner, home in zip(*map(list, copies.nonzero()), strict=True):
            for end in self._ends(int(owner), int(home)):
                self._carried[end] += int(copies[owner, home])

    def with_one_more(self, owner: int, home: int) -> float:
        """Return the seconds of the busiest link, per byte of an expert, if one more copy were in transit."""
        links, ends = self._links, self._ends(owner, home)
        _, across, _ = ends[0]
        copy_s = links.across_s_per_byte if across else links.inside_s_per_byte
        return max(self._busiest_s, *(copy_s * (self._carried[end] + 1) for end in ends))

    def add(self, owner: int, home: int) -> None:
        """Add one more copy in transit."""
        self._busiest_s = self.with_one_more(owner, home)
        self._carried.update(self._ends(owner, home))

    def _ends(self, owner: int, home: int) -> tuple[tuple[str, bool, int], tuple[str, bool, int]]:
        """Return, by end of a way, whether it leaves the node, and whose link it uses: rank or node."""
        nodes = self._links.nodes
        across = nodes[owner] != nodes[home]
        if across and not self._links.card_per_rank:
            owner, home = nodes[owner], nodes[home]
        return ("out", across, owner), ("in", across, home)
