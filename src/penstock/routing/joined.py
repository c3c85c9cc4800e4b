"""Rows that are for several experts: one row serves all of a token's experts in a node, or on a rank.

Between nodes such a row is for a node and a *set of places* there. Ranks tell each other rows by set, so the
copies inside the node are blocks of a leg that are sent several times: `joined_legs`. Counts by expert cannot
say how many such rows there are: `distinct_rows` estimates it.
Shapes: P ranks, N nodes of G ranks, C pieces, S sets of places, numbered from the set of the first place
alone: place p is in set s where bit p of s + 1 is set. For estimates E experts in equal parts (nodes, or
ranks) of L, k of them chosen by every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from math import comb
from typing import Final

import numpy as np

from penstock.apportion import Counts
from penstock.mesh import Group
from penstock.routing.legs import Leg, Place
from penstock.routing.sizes import Floats

MOST_NODE_SIZE = 8
"""Largest node: ranks exchange the number of rows for every set of places in a node, 255 numbers for 8."""
ALWAYS: Final = 0.999
"""Share assumed for an expert that every token chooses, since odds have to be finite."""


def num_sets(node_size: int) -> int:
    """Return S, the number of sets of at least one place."""
    return int(2**node_size - 1)


@cache
def sets_of(node_size: int) -> Counts:
    """Return which places are in every set, [S, G], 0 or 1."""
    number_S1, place_G = np.arange(1, num_sets(node_size) + 1)[:, None], np.arange(node_size)
    sets_SG: Counts = number_S1 >> place_G & 1
    sets_SG.setflags(write=False)
    return sets_SG


def joined_legs(sent_NSC: Counts, received_PSC: Counts, place: Place) -> list[tuple[Leg, Leg]]:
    """Return, by piece, the two legs of the rank at `place`, whose rows are sorted by node and set of places.

    Args:
        sent_NSC: The rows for every node, by set.
        received_PSC: The rows from every rank for this node, by set.
        place: The place of the rank.
    """
    reached_SG, nodes = sets_of(place.node_size), place.nodes
    received_NGSC = received_PSC.reshape(nodes, place.node_size, *received_PSC.shape[1:])
    held_NSC = received_NGSC[:, place.local]
    to_NC, from_NC = sent_NSC.sum(axis=1), held_NSC.sum(axis=1)
    into_GC = reached_SG.T @ held_NSC.sum(axis=0)
    own_S = reached_SG[:, place.local].astype(bool)
    came_GC = received_NGSC.sum(axis=0)[:, own_S].sum(axis=1)
    legs = []
    for piece in range(sent_NSC.shape[2]):
        to_nodes, held_B = _plain(to_NC[:, piece]), held_NSC[:, :, piece].reshape(-1)
        across = Leg(Group.RAIL, to_nodes, tuple(range(nodes)), to_nodes, _plain(from_NC[:, piece]))
        filled = np.flatnonzero(held_B)  # most sets are empty where there are many
        order = np.nonzero(reached_SG[filled % len(reached_SG)].T)[1]
        splits = _plain(into_GC[:, piece]), _plain(came_GC[:, piece])
        legs.append((across, Leg(Group.NODE, _plain(held_B[filled]), _plain(order), *splits)))
    return legs


def arrivals(received_PSC: Counts, place: Place) -> Counts:
    """Return the sizes of the blocks in which rows are stored at the rank at `place` on arrival, [C, B].

    They are sorted by the sender's place, its node and the set; see `filled_blocks`.
    """
    received_NGSC = received_PSC.reshape(place.nodes, place.node_size, *received_PSC.shape[1:])
    own_S = sets_of(place.node_size)[:, place.local].astype(bool)
    return filled_blocks(received_NGSC[:, :, own_S].swapaxes(0, 1))


def filled_blocks(sizes: Counts) -> Counts:
    """Return the blocks that some piece fills, by piece, [C, B]; an empty one where there are no rows at all.

    Args:
        sizes: The sizes of all blocks, [..., C].
    """
    sizes_BC = sizes.reshape(-1, sizes.shape[-1])
    filled = np.flatnonzero(sizes_BC.sum(axis=1))
    filled_CB: Counts = sizes_BC[filled if filled.size else [0]].T
    return filled_CB


def _plain(numbers: Counts) -> tuple[int, ...]:
    return tuple(numbers.tolist())


@lru_cache(maxsize=1024)
def distinct_parts(parts: int, num_experts: int, top_k: int, groups: int = 1, limit: int = 1) -> float:
    """Return in how many of equal parts a token's experts are on average, if all choices are equally likely.

    Without groups it is n (1 - C(E - E / n, k) / C(E, k)), for many experts n (1 - (1 - 1 / n)^k).

    Args:
        groups, limit: A token's experts come from `limit` of `groups` groups of experts (DeepSeek).
    """
    size, share = num_experts // groups, num_experts // parts
    open_to_token = limit * size
    every = comb(groups, limit) * comb(open_to_token, top_k)
    missed = 0
    for part in range(parts):
        first, last = part * share, (part + 1) * share
        inside = [max(0, min(last, (g + 1) * size) - max(first, g * size)) for g in range(groups)]
        # The ways in which so many groups hold a number of the part's experts.
        ways = {(0, 0): 1}
        for held in inside:
            longer = dict(ways)
            for (chosen, total), count in ways.items():
                key = chosen + 1, total + held
                longer[key] = longer.get(key, 0) + count
            ways = longer
        for (chosen, total), count in ways.items():
            missed += count * comb(open_to_token - total, top_k) if chosen == limit else 0
    return parts - missed / every


def distinct_rows(inputs: Counts, top_k: int, nearness: float = 1.0) -> Counts:
    """Return rows of every source for every part, [sources, parts], from its inputs for their experts.

    Counts do not say which experts are chosen together. So every token is assumed to choose k different ones
    with odds that give each expert its share; with even counts the result is exactly `distinct_parts`.

    Args:
        inputs: The inputs of every source for every part's experts, [sources, parts, L].
        nearness: A factor on the result, since choices limited to groups meet in fewer parts.
    """
    rows, busiest = inputs.sum(axis=2), inputs.max(axis=2, initial=0)
    tokens = np.maximum(np.ceil(rows.sum(axis=1) / top_k), inputs.max(axis=(1, 2), initial=0))[:, None]
    # The probability that a token chooses nothing in a part, [sources, parts].
    share = inputs / np.maximum(tokens, 1)[:, :, None]
    sources, parts, held = share.shape
    even = top_k / max(parts * held - top_k, 1)  # keeps products of many odds in range
    share = np.minimum(share, ALWAYS)
    odds = share / (1 - share) / even
    own = np.zeros((parts, sources, top_k + 1))
    own[:, :, 0] = 1
    for expert in range(held):
        own[:, :, 1:] += own[:, :, :-1] * odds[:, :, expert].T[:, :, None]
    before, after = list(_products(own)), list(_products(own[::-1]))[::-1]
    total = np.maximum(before[-1][:, top_k], np.finfo(float).tiny)
    elsewhere = [_product(before[part], after[part + 1])[:, top_k] for part in range(parts)]
    met = tokens * (1 - (np.stack(elsewhere, axis=1) / total[:, None])) * nearness
    least = np.maximum(busiest, np.ceil(rows / min(top_k, inputs.shape[2])))
    distinct: Counts = np.clip(np.rint(met), least, np.minimum(tokens, rows)).astype(np.int64)
    return distinct


def _products(polynomials: Floats) -> Iterator[Floats]:
    """Yield the products of no polynomial, of the first, of the first two, and so on, to the power k."""
    product = np.zeros_like(polynomials[0])
    product[:, 0] = 1
    yield product
    for polynomial in polynomials:
        product = _product(product, polynomial)
        yield product


def _product(one: Floats, other: Floats) -> Floats:
    product = np.zeros_like(one)
    for power in range(one.shape[1]):
        product[:, power:] += one[:, power, None] * other[:, : one.shape[1] - power]
    return product
