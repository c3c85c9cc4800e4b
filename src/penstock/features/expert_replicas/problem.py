"""Input of a planner of replicas: the loads of a layer, and the costs of rows, weights and computation.

Shapes: P ranks of the expert group, N nodes, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.placement import EMPTY, SPLIT, ExpertPlacement, Replication
from penstock.routing.links import Links
from penstock.routing.replicas import ExactSplit
from penstock.routing.sizes import Floats, Ints, exact_product


class Slack(NamedTuple):
    """Seconds of Trans and of Agg that a schedule hides in one layer."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class ExpertCosts:
    """The costs of a layer's rows and experts; the same in every step.

    Pro-Prophet's own schedule hides weights under the block before, and those of the first block under
    nothing: with these slacks given, the sum over blocks is exact; with Eq 8 it is a few per cent off
    (SYSTEMS 6.8).

    Attributes:
        links: The links between the ranks of an expert group.
        row_s: The seconds of an expert's forward for one row; backward takes twice that.
        row_bytes: The bytes of a row in one of the four all-to-alls of a step; where ranks share an expert,
            each of which sends some of its rows, on the links of one of them.
        parameter_bytes, gradient_bytes: The bytes of one expert, as Trans and Agg carry them.
        other_s: The seconds of the forward of the rest of the block.
        forward_slack_s, backward_slack_s: The seconds of Trans and of Agg that the schedule hides; None = as
            Eq 8 assumes, the forward (or backward) of experts and of the rest of the block.
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
        """Return the hidden time of Trans and of Agg.

        Args:
            experts_s: The seconds of the forward of the layer's experts.
        """
        block_s = experts_s + self.other_s
        forward, backward = self.forward_slack_s, self.backward_slack_s
        return block_s if forward is None else forward, 2 * block_s if backward is None else backward


@dataclass(frozen=True, kw_only=True)
class ExpertProblem:
    """The problem of one layer in one step.

    Attributes:
        loads: The rows that start on rank p and go to expert e, [P, E], by expert number.
        placement: The ranks that own and hold the experts permanently.
        replica_slots: The free slots of every rank.
        exact: Whether rows of shared experts are split by the loads of the step that runs; else by those from
            which the plan is made.

    Raises:
        ValueError: Where sizes contradict each other.
    """

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


# ---- the time of a layer with some experts as replicas: per rank and link, and by Pro-Prophet's
# equation 8
#
# Shapes: P ranks of the expert group, E experts.


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """The load of a layer on ranks and links in one step.

    Attributes:
        traffic: The rows that rank p sends to rank r, its own on the diagonal, [P, P].
        copies: The experts whose parameters rank p sends to rank r, and whose gradients it gets back, [P, P].
    """

    traffic: Floats
    copies: Ints

    @staticmethod
    def of(loads: Ints, replication: Replication, nodes: Sequence[int] = ()) -> LayerLoad:
        """Return the load with rows `loads` [P, E] sent as a replication says.

        Args:
            nodes: The node of every rank; () = all are in one node.
        """
        ranks = replication.placement.ranks
        if replication.limit is not None:
            table_SPCN = ExactSplit.of(replication, nodes).table(loads[:, None])
            rows = table_SPCN.sum(axis=(2, 3)).astype(np.float64)
            return LayerLoad(traffic=rows, copies=copies_of(replication))
        pairs, rank_of_position = replication.pairs, np.repeat(np.arange(ranks), replication.slots)
        rows = loads[pairs.rank, pairs.expert] * pairs.parts
        cells = np.bincount(pairs.rank * ranks + rank_of_position[pairs.position], rows, ranks**2)
        return LayerLoad(traffic=cells.reshape(ranks, ranks) / SPLIT, copies=copies_of(replication))

    @cached_property
    def computed(self) -> Floats:
        """Rows that every rank computes: H of Eq 2, [P]."""
        rows: Floats = self.traffic.sum(axis=0)
        return rows

    @cached_property
    def received(self) -> Floats:
        """Rows that every rank receives from others: R of Eq 1, [P]."""
        rows: Floats = self.computed - self.traffic.diagonal()
        return rows


def copies_of(replication: Replication) -> Ints:
    """Return the number of experts whose parameters rank p sends to rank r, [P, P]."""
    return copies_to(replication.replicas, replication.placement)


def copies_to(replicas: Sequence[Sequence[int]], placement: ExpertPlacement) -> Ints:
    """Return copies, [P, P], for replicas by rank that are not yet a replication; EMPTY slots get none."""
    copies = np.zeros((placement.ranks,) * 2, np.int64)
    for rank, here in enumerate(replicas):
        for expert in here:
            if expert != EMPTY:
                copies[placement.owners[expert], rank] += 1
    return copies


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """The parts of a layer's time in one step, forward and backward.

    Attributes:
        rows_s: The four all-to-alls.
        experts_s: The experts of the slowest rank.
        weights_s: The parts of Trans and Agg that are exposed.
    """

    rows_s: float
    experts_s: float
    weights_s: float

    @property
    def total_s(self) -> float:
        return self.rows_s + self.experts_s + self.weights_s


def seconds_of(costs: ExpertCosts, load: LayerLoad) -> LayerSeconds:
    """Return times by rank and link: each transfer's busiest link, each computation's slowest rank."""
    experts_s = costs.row_s * float(load.computed.max())
    rows_s = 4 * costs.row_bytes * costs.links.seconds(load.traffic)
    weights_s = exposed_s(costs, costs.links.seconds(load.copies), experts_s)
    return LayerSeconds(rows_s=rows_s, experts_s=3 * experts_s, weights_s=weights_s)


def exposed_s(costs: ExpertCosts, per_byte_s: float, experts_s: float) -> float:
    """Return the exposed seconds of Trans and Agg.

    Args:
        per_byte_s: The seconds per byte of the busiest link on the way of copies, 0 = there are none.
        experts_s: The seconds of the forward of experts.
    """
    if not per_byte_s:
        return 0.0
    forward_slack_s, backward_slack_s = costs.slack_s(experts_s)  # Agg is Trans in reverse
    forward_s = max(0.0, per_byte_s * costs.parameter_bytes - forward_slack_s)
    return forward_s + max(0.0, per_byte_s * costs.gradient_bytes - backward_slack_s)


def layer_seconds(problem: ExpertProblem, replication: Replication) -> LayerSeconds:
    """Return the time of the layer with these replicas, by rank and link."""
    return seconds_of(problem.costs, LayerLoad.of(problem.loads, replication, problem.costs.links.nodes))


def paper_seconds(
    costs: ExpertCosts, received: Floats, computed: Floats, copied: int, excluded: int
) -> float:
    """Return the time of the layer by Eq 8 of Pro-Prophet, whose schedule hides weights under computation.

    Args:
        received, computed: The rows that every rank receives and computes, R and H, [P].
        copied: The number s of experts with replicas.
        excluded: The number n of ranks that do not get such an expert.
    """
    ranks, byte_s = len(computed), costs.links.mean_s_per_byte
    experts_s = costs.row_s * float(computed.max())
    copies = copied * (ranks - excluded) / ranks
    trans_s = max(0.0, copies * costs.parameter_bytes * byte_s - experts_s - costs.other_s)
    agg_s = max(0.0, copies * costs.gradient_bytes * byte_s - 2 * experts_s - 2 * costs.other_s)
    rows_s = float(received.max()) * costs.row_bytes * byte_s
    return 4 * rows_s + 3 * experts_s + trans_s + agg_s
