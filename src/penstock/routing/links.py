"""The links between ranks: seconds of bytes that every rank sends to every rank.

Shapes: P ranks of a group, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.routing.sizes import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Links:
    """The cost of a byte between ranks of one node, and between nodes.

    Attributes:
        nodes: The node of every rank, from 0.
        across_s_per_byte: The seconds per byte of a node's card, which all of its ranks share, or of each
            rank's own card where `card_per_rank`.
        inside_s_per_byte: The seconds per byte of each rank's link inside its node.
    """

    nodes: tuple[int, ...]
    across_s_per_byte: float
    inside_s_per_byte: float
    card_per_rank: bool = False

    def seconds(self, sent_PP: Ints | Floats) -> float:
        """Return the time that the busiest link needs for bytes sent from every rank to every rank.

        Links are full duplex, and links inside nodes work while cards do.
        """
        return float(self.rank_seconds(sent_PP).max(initial=0.0))

    def rank_seconds(self, sent_PP: Ints | Floats) -> Floats:
        """Return the time of the busiest link that each rank's bytes pass, [P]."""
        if self.card_per_rank:
            card_P = _busier(self.across * sent_PP)
        elif self.firsts is not None:
            sent_NN = np.add.reduceat(np.add.reduceat(sent_PP, self.firsts, axis=0), self.firsts, axis=1)
            np.fill_diagonal(sent_NN, 0)
            card_P = _busier(sent_NN)[np.array(self.nodes)]
        else:
            card_P = self.members.T @ _busier(self.members @ (self.across * sent_PP) @ self.members.T)
        inside_P = _busier(self.inside * sent_PP)
        seconds_P: Floats = np.maximum(self.inside_s_per_byte * inside_P, self.across_s_per_byte * card_P)
        return seconds_P

    @cached_property
    def pair_s_per_byte(self) -> Floats:
        """Seconds per byte from rank to rank while all other ranks are silent, [P, P]."""
        return self.across_s_per_byte * self.across + self.inside_s_per_byte * self.inside

    @cached_property
    def mean_s_per_byte(self) -> float:
        """1 / the papers' average bandwidth: seconds per byte that a rank receives when all send evenly."""
        ranks = len(self.nodes)
        return self.seconds(np.ones((ranks, ranks))) / max(1, ranks - 1)

    @cached_property
    def firsts(self) -> Ints | None:
        """The first rank of every node where the ranks of nodes are consecutive, [N]; else None."""
        nodes = np.array(self.nodes)
        if (np.diff(nodes) < 0).any() or len(np.unique(nodes)) <= nodes.max():
            return None
        firsts: Ints = np.searchsorted(nodes, np.arange(nodes.max() + 1))
        return firsts

    @cached_property
    def members(self) -> Floats:
        """1 where a rank is in a node, [N, P]."""
        nodes = np.arange(max(self.nodes) + 1)
        members: Floats = np.equal.outer(nodes, np.array(self.nodes)).astype(np.float64)
        return members

    @cached_property
    def across(self) -> Floats:
        """1 where two ranks are in different nodes, [P, P]."""
        nodes = np.array(self.nodes)
        across: Floats = np.not_equal.outer(nodes, nodes).astype(np.float64)
        return across

    @cached_property
    def inside(self) -> Floats:
        """1 where two different ranks are in one node, [P, P]."""
        return 1.0 - self.across - np.eye(len(self.nodes))


def _busier(sent: Floats) -> Floats:
    """Return, by row of the matrix, what is sent or received, whichever is more."""
    busier: Floats = np.maximum(sent.sum(axis=1), sent.sum(axis=0))
    return busier
