"""Input of a planner of replicas: the loads of a layer, and the costs of rows, weights and computation.

Shapes: P ranks of the expert group, N nodes, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from penstock.placement import ExpertPlacement
from penstock.routing.integers import Ints, exact_product
from penstock.routing.links import Links


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
