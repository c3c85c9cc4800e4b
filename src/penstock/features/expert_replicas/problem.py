"""Input of a planner of replicas: the loads of a layer, and the costs of rows, weights and computation.

Shapes: P ranks of the expert group, N nodes, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.placement import ExpertPlacement
from penstock.routing.integers import Floats, Ints, exact_product


@dataclass(frozen=True, kw_only=True)
class Links:
    """The cost of a byte between ranks of one node, and between nodes.

    nodes: by rank, from 0. across_s_per_byte: of a node's card, which all of its ranks share, or of each
    rank's own card where `card_per_rank`. inside_s_per_byte: of each rank's link inside its node.
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
        found: Floats = np.maximum(self.inside_s_per_byte * inside_P, self.across_s_per_byte * card_P)
        return found

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


class Slack(NamedTuple):
    """Seconds of Trans and of Agg that a schedule hides in one layer."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class ExpertCosts:
    """The costs of a layer's rows and experts; the same in every step.

    row_s: of an expert's forward for one row; backward takes twice that. row_bytes: of a row in one of the
    four all-to-alls of a step. parameter_bytes, gradient_bytes: of one expert, as Trans and Agg carry them.
    forward_slack_s, backward_slack_s: time of Trans and of Agg that the schedule hides; None: as Eq 8
    assumes, the forward (or backward) of experts and of the rest of the block, `other_s` forward.

    Pro-Prophet's own schedule hides them under the block before, and those of the first block under nothing:
    with these slacks given, the sum over blocks is exact; with Eq 8 it is a few per cent off (SYSTEMS 6.8).
    """

    links: Links
    row_s: float
    row_bytes: float
    parameter_bytes: float
    gradient_bytes: float
    other_s: float = 0.0
    forward_slack_s: float | None = None
    backward_slack_s: float | None = None

    def hiding(self, slack: Slack) -> ExpertCosts:
        """Return the costs of a layer with this slack."""
        return replace(self, forward_slack_s=slack.forward_s, backward_slack_s=slack.backward_s)

    def slack_s(self, experts_s: float) -> tuple[float, float]:
        """Return the hidden time of Trans and of Agg. experts_s: forward of the layer's experts."""
        block_s = experts_s + self.other_s
        forward, backward = self.forward_slack_s, self.backward_slack_s
        return block_s if forward is None else forward, 2 * block_s if backward is None else backward


@dataclass(frozen=True, kw_only=True)
class ExpertProblem:
    """One layer in one step. loads: [P, E], rows that start on rank p and go to expert e, by expert number.
    placement: which ranks own and hold the experts permanently. replica_slots: free slots of every rank.
    exact: whether rows of shared experts are split by the loads of the step that runs; else by those from
    which the plan is made. Raises ValueError where sizes contradict each other."""

    placement: ExpertPlacement
    replica_slots: int
    loads: Ints
    costs: ExpertCosts
    exact: bool = True

    def __post_init__(self) -> None:
        shape = (self.placement.ranks, self.placement.num_experts)
        if self.loads.shape != shape or len(self.costs.links.nodes) != shape[0]:
            raise ValueError(
                f"loads {self.loads.shape} and nodes of {len(self.costs.links.nodes)} ranks: "
                f"the placement has {shape[0]} ranks and {shape[1]} experts"
            )

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @cached_property
    def expert_rows(self) -> Ints:
        """Rows of every expert from all ranks, [E]."""
        rows: Ints = self.loads.sum(axis=0)
        return rows

    @cached_property
    def node_loads(self) -> Ints:
        """Rows that start in a node, by expert, [N, E]."""
        return exact_product(self.costs.links.members, self.loads)

    @cached_property
    def mean_rows(self) -> float:
        """Rows that every rank would compute if all computed alike."""
        return float(self.loads.sum() / self.ranks)


def _busier(sent: Floats) -> Floats:
    """Return, by row of the matrix, what is sent or received, whichever is more."""
    busier: Floats = np.maximum(sent.sum(axis=1), sent.sum(axis=0))
    return busier
