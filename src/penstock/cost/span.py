"""Places of a group's ranks, and the links that they share: the nodes that a collective crosses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from penstock.features.dispatch import DISPATCHES, Dispatch, Place
from penstock.graph import Lane
from penstock.mesh import Axes, Mesh, node_of
from penstock.ops.core import outward
from penstock.routing.legs import place_in


@dataclass(frozen=True, kw_only=True)
class Span:
    """Groups of `ranks` members each, all of which communicate at the same time, as they do in a step.

    Attributes:
        ranks: The members of a group.
        nodes: The most nodes that a group covers.
        most, fewest: The most and the fewest members of a group on one of its nodes.
        leaving: The amount that leaves the busiest node in an all-to-all, in buffers of one rank.
        crossing: The number of groups that leave the busiest node.
    """

    ranks: int
    nodes: int
    most: int
    fewest: int
    leaving: float
    crossing: int

    @staticmethod
    def regular(nodes: int, per_node: int, at_once: int = 1) -> Span:
        """Return the span of `per_node` members on each of `nodes`.

        Args:
            at_once: The number of groups on these nodes.
        """
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

    Args:
        node_size: 0 = not known, and every rank counts as a node.
    """
    size = node_size or 1
    return Span.of([node_of(rank, size) for rank in ranks] for ranks in mesh.groups(axes))


# ---- bytes and messages of the legs of a dispatch under even routing, read off the legs themselves --------


@dataclass(frozen=True)
class EvenLeg:
    """One leg, per byte of the rows that each rank has.

    Attributes:
        share: The bytes over the link of the busiest rank.
        sharing: The bytes that a node sends at once, in shares of such a rank.
        messages: The messages that the busiest rank sends to others.
    """

    lane: Lane
    share: float
    sharing: float
    messages: int


def even_leg(dispatch: str, op: str, nodes: int, node_size: int) -> EvenLeg:
    """Return the leg of a registered dispatch in an expert group of whole nodes; combine has the same leg.

    Args:
        op: The op of the leg in dispatch or combine.
        node_size: The ranks of the expert group in a node.
    """
    return _even_leg(DISPATCHES[dispatch], outward(op), nodes, node_size)


@cache
def _even_leg(dispatch: Dispatch, op: str, nodes: int, node_size: int) -> EvenLeg:
    ranks = nodes * node_size
    number = [hop.op for hop in dispatch.hops].index(op)
    table = np.broadcast_to(np.int64(1), (ranks, ranks))  # a row for every rank, without memory
    rows, messages = [], 0
    for rank in range(node_size):  # nodes are alike
        place = Place(rank, ranks, node_size)
        leg = dispatch.legs(table, place)[number]
        own = place_in(leg.axes, place)
        for splits in (leg.input_splits, leg.output_splits):
            others = [size for member, size in enumerate(splits) if size and member != own]
            rows.append(sum(others))
            messages = max(messages, len(others))
    busiest = max(rows)
    sharing = max(sum(rows[::2]), sum(rows[1::2])) / busiest if busiest else 0.0
    return EvenLeg(dispatch.hops[number].lane, busiest / ranks, sharing, messages)
