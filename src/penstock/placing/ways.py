"""Copies of experts on their way to hosts, counted by link: one more is priced without a recount."""

from __future__ import annotations

from collections import Counter

from penstock.placing.integers import Ints
from penstock.placing.problem import Links


class Ways:
    """The load of links. copies: by owner and host, [P, P]."""

    def __init__(self, links: Links, copies: Ints) -> None:
        self._links, self._busiest_s = links, links.seconds(copies)
        self._carried: Counter[tuple[str, bool, int]] = Counter()
        for owner, host in zip(*map(list, copies.nonzero()), strict=True):
            for end in self._ends(int(owner), int(host)):
                self._carried[end] += int(copies[owner, host])

    def with_one_more(self, owner: int, host: int) -> float:
        """Return the seconds of the busiest link, per byte of an expert, if one more copy were in transit."""
        links, ends = self._links, self._ends(owner, host)
        _, across, _ = ends[0]
        copy_s = links.across_s_per_byte if across else links.inside_s_per_byte
        return max(self._busiest_s, *(copy_s * (self._carried[end] + 1) for end in ends))

    def add(self, owner: int, host: int) -> None:
        """Add one more copy in transit."""
        self._busiest_s = self.with_one_more(owner, host)
        self._carried.update(self._ends(owner, host))

    def _ends(self, owner: int, host: int) -> tuple[tuple[str, bool, int], tuple[str, bool, int]]:
        """Return, by end of a way, whether it leaves the node, and whose link it uses: rank or node."""
        nodes = self._links.nodes
        across = nodes[owner] != nodes[host]
        if across and not self._links.card_per_rank:
            owner, host = nodes[owner], nodes[host]
        return ("out", across, owner), ("in", across, host)
