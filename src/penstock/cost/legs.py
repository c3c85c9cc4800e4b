"""Bytes and messages of the legs of a dispatch under even routing, read off the legs themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from penstock.features.dispatch import DISPATCHES, Dispatch, Place
from penstock.graph import Lane
from penstock.ops.transfers import outward
from penstock.routing.legs import place_in


@dataclass(frozen=True)
class EvenLeg:
    """One leg, per byte of the rows that each rank has.

    share: bytes over the link of the busiest rank. sharing: what a node sends at once, in shares of such a
    rank. messages: that the busiest rank sends to others.
    """

    lane: Lane
    share: float
    sharing: float
    messages: int


def even_leg(dispatch: str, op: str, nodes: int, node_size: int) -> EvenLeg:
    """Return the leg of a registered dispatch in an expert group of whole nodes; combine has the same leg."""
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
