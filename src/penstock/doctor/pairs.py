"""Chooses which two ranks measure the link between them, and when: no rank is measured twice at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ranks. nodes: of either rank, counted from 0; equal if they share one."""

    asks: int
    answers: int
    nodes: tuple[int, int]

    @property
    def inside(self) -> bool:
        """Whether both ranks share a node."""
        return self.nodes[0] == self.nodes[1]

    @property
    def words(self) -> str:
        """Nodes of the pair in words, such as `node 0 to node 2`."""
        first, second = self.nodes
        return f"inside node {first}" if self.inside else f"node {first} to node {second}"


def nodes_of(local_ranks: Mapping[int, int]) -> list[list[int]]:
    """Return the ranks of every node: a node begins with local rank 0, as launchers count."""
    nodes: list[list[int]] = []
    for rank, local in sorted(local_ranks.items()):
        if local == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    return nodes


def rounds_of(nodes: Sequence[Sequence[int]]) -> Iterator[list[Pair]]:
    """Yield first the first two ranks of every node, then every pair of nodes, half of the nodes at a time.

    A node has one pair in a round, as in a round-robin tournament: one place stays fixed, and the others move
    on by one.
    """
    inside = [
        Pair(asks=ranks[0], answers=ranks[1], nodes=(node, node))
        for node, ranks in enumerate(nodes)
        if len(ranks) > 1
    ]
    if inside:
        yield inside
    places: list[int | None] = [*range(len(nodes)), *([None] if len(nodes) % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        pairs = [tuple(sorted((one, two))) for one, two in met if one is not None and two is not None]
        yield [Pair(asks=nodes[a][0], answers=nodes[b][0], nodes=(a, b)) for a, b in sorted(pairs)]
        places = [places[0], places[-1], *places[1:-1]]
