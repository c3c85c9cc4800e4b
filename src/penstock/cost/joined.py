"""Numbers of rows that travel where one row serves all of a token's experts in a node, or on a rank.

No torch.
Shapes: E experts in equal parts (nodes, or ranks) of L, k of them chosen by every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import comb
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.apportion import Counts

Odds = npt.NDArray[np.float64]

ALWAYS: Final = 0.999
"""Share assumed for an expert that every token chooses, since odds have to be finite."""


@lru_cache(maxsize=1024)
def distinct_parts(parts: int, num_experts: int, top_k: int, groups: int = 1, limit: int = 1) -> float:
    """Return in how many of equal parts a token's experts are on average, if all choices are equally likely.

    groups, limit: a token's experts come from `limit` of `groups` groups of experts (DeepSeek). Without them
    it is n (1 - C(E - E / n, k) / C(E, k)), for many experts n (1 - (1 - 1 / n)^k).
    """
    size, share = num_experts // groups, num_experts // parts
    open_to_token = limit * size
    every = comb(groups, limit) * comb(open_to_token, top_k)
    missed = 0
    for part in range(parts):
        first, last = part * share, (part + 1) * share
        inside = [max(0, min(last, (g + 1) * size) - max(first, g * size)) for g in range(groups)]
        for held, ways in _held_by_chosen(inside, limit).items():
            missed += ways * comb(open_to_token - held, top_k)
    return parts - missed / every


def _held_by_chosen(inside: Sequence[int], limit: int) -> dict[int, int]:
    """Return the ways in which `limit` groups hold a number of a part's experts. inside: of every group."""
    ways = {(0, 0): 1}
    for held in inside:
        longer = dict(ways)
        for (chosen, total), count in ways.items():
            key = chosen + 1, total + held
            longer[key] = longer.get(key, 0) + count
        ways = longer
    return {total: count for (chosen, total), count in ways.items() if chosen == limit}


def distinct_rows(inputs: Counts, top_k: int, nearness: float = 1.0) -> Counts:
    """Return rows of every source for every part, [sources, parts], from its inputs for their experts.

    inputs: [sources, parts, L]. Counts do not say which experts are chosen together. So every token is
    assumed to choose k different ones with odds that give each expert its share; with even counts the result
    is exactly `distinct_parts`. nearness: factor on the result, since choices limited to groups meet in fewer
    parts.
    """
    rows, busiest = inputs.sum(axis=2), inputs.max(axis=2, initial=0)
    tokens = np.maximum(np.ceil(rows.sum(axis=1) / top_k), inputs.max(axis=(1, 2), initial=0))[:, None]
    met = tokens * (1 - _missed(inputs / np.maximum(tokens, 1)[:, :, None], top_k)) * nearness
    least = np.maximum(busiest, np.ceil(rows / min(top_k, inputs.shape[2])))
    found: Counts = np.clip(np.rint(met), least, np.minimum(tokens, rows)).astype(np.int64)
    return found


def _missed(share: Odds, top_k: int) -> Odds:
    """Return the probability that a token chooses nothing in a part, [sources, parts].

    share: of tokens that choose an expert. Of k choices among all: the sum of products of the odds of k
    experts elsewhere, over that of any k.
    """
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
    return np.stack(elsewhere, axis=1) / total[:, None]


def _products(polynomials: Odds) -> Iterator[Odds]:
    """Yield the products of no polynomial, of the first, of the first two, and so on, to the power k."""
    found = np.zeros_like(polynomials[0])
    found[:, 0] = 1
    yield found
    for each in polynomials:
        found = _product(found, each)
        yield found


def _product(one: Odds, other: Odds) -> Odds:
    found = np.zeros_like(one)
    for power in range(one.shape[1]):
        found[:, power:] += one[:, power, None] * other[:, : one.shape[1] - power]
    return found
