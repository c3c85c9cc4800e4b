"""Places of a group's ranks, and the links that they share: the nodes that a collective crosses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from penstock.mesh import Axes, Mesh, node_of


@dataclass(frozen=True, kw_only=True)
class Span:
    """Groups of `ranks` members each, all of which communicate at the same time, as they do in a step.

    nodes: most nodes that a group covers. most, fewest: members of a group on one of its nodes. leaving: what
    leaves the busiest node in an all-to-all, in buffers of one rank. crossing: groups that leave the busiest
    node.
    """

    ranks: int
    nodes: int
    most: int
    fewest: int
    leaving: float
    crossing: int

    @staticmethod
    def regular(nodes: int, per_node: int, at_once: int = 1) -> Span:
        """Return the span of `per_node` members on each of `nodes`; at_once: groups on these nodes."""
        members = [node for node in range(nodes) for _ in range(per_node)]
        return Span.of([members] * at_once)

    @staticmethod
    def apart(ranks: int) -> Span:
        """Return the span with every member on a node of its own, as is assumed where nodes are unknown."""
        return Span.regular(ranks, 1)

    @staticmethod
    def of(groups: Iterable[Sequence[int]]) -> Span:
        """Return the span of groups of one size, each given as the nodes of its members."""
        leaving, crossing = Counter[int](), Counter[int]()
        counts = [Counter(members) for members in groups]
        for count in counts:
            ranks = count.total()
            for node, here in count.items():
                leaving[node] += here * (ranks - here)
                crossing[node] += here < ranks
        ranks = counts[0].total()
        return Span(
            ranks=ranks,
            nodes=max(map(len, counts)),
            most=max(max(count.values()) for count in counts),
            fewest=min(min(count.values()) for count in counts),
            leaving=max(leaving.values()) / ranks,
            crossing=max(crossing.values()),
        )


@lru_cache(maxsize=256)
def span_of(mesh: Mesh, axes: Axes, node_size: int) -> Span:
    """Return the span of the groups along `axes`, in a world with `node_size` consecutive ranks in a node.

    node_size 0: not known, every rank counts as a node.
    """
    size = node_size or 1
    return Span.of([node_of(rank, size) for rank in ranks] for ranks in mesh.groups(axes))
