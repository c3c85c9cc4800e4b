"""Which experts ranks hold replicas of next: planned from the loads of one step, and dropped where plans do
not last.

A plan is made from the loads of one step, and runs with those of the next. So every plan is judged by the
loads of the step after it, whether it ran or not: while it would have been slower than no replicas at all,
none are in use, and when plans hold again, they are. A new plan is judged by the loads from which it was
made,
too: published planners price links by an average.

Shapes: P ranks of the world, Y MoE layers, E experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.features.expert_replicas.encoding import Share
from penstock.features.expert_replicas.planners import Planner, pays
from penstock.features.expert_replicas.problem import ExpertCosts, ExpertProblem, Slack
from penstock.mesh import Group, Mesh
from penstock.placement import Replication
from penstock.routing.integers import Ints
from penstock.runtime.loads import Loads


@dataclass(frozen=True, kw_only=True)
class ExpertMoving:
    """How a stack decides which experts are replicas of which ranks.

    planner: makes, from the loads of a layer, the replicas of its ranks. costs: what rows and weights cost,
    the same on all ranks. slack: by MoE layer, how much of the replicas' transfers the schedule hides; () =
    what Eq 8 takes for it. every: the number of steps from one plan to the next; plans are judged after each
    step.
    exact: whether rows are split by the loads of their own step.
    """

    planner: Planner
    costs: ExpertCosts
    slack: tuple[Slack, ...] = ()
    every: int = 1
    exact: bool = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every = {self.every}: experts are planned after 1 step or more. Use 1")

    @property
    def name(self) -> str:
        """A name that distinguishes this way of planning from others."""
        planner = getattr(self.planner, "__qualname__", type(self.planner).__qualname__)
        return f"{planner} every {self.every}"

    def costs_of(self, moe_layer: int) -> ExpertCosts:
        """Return what rows and weights cost in a layer."""
        return self.costs.hiding(self.slack[moe_layer]) if self.slack else self.costs


@dataclass(frozen=True)
class Plans:
    """What was planned last, by MoE layer, and which plans are in use.

    age_steps: steps since the plans were made; 0 = plan again.
    """

    made: tuple[Replication, ...]
    in_use: tuple[bool, ...]
    age_steps: int = 0

    @staticmethod
    def none(replications: Sequence[Replication]) -> Plans:
        """Return the plans before the first step, with the replicas of that time."""
        return Plans(tuple(replications), (True,) * len(replications))

    def after(self, loads_YPE: Sequence[Ints], moving: ExpertMoving) -> Plans:
        """Return the replicas after a step with these loads, [P, E] of each layer."""
        return self.joined([self.share(loads_YPE, moving)], moving)

    def share(
        self, loads_YPE: Sequence[Ints], moving: ExpertMoving, place: int = 0, places: int = 1
    ) -> Share:
        """Return what one of `places` ranks finds for its layers, which are those of `layers_of`."""
        assert len(loads_YPE) == len(self.made), (
            f"{len(loads_YPE)} layers have loads, {len(self.made)} replicas"
        )
        return tuple(self._next(y, loads_YPE[y], moving) for y in self.layers_of(place, places))

    def joined(self, shares: Sequence[Share], moving: ExpertMoving) -> Plans:
        """Return the plans joined from what all ranks have found, by place."""
        places = len(shares)
        found = [shares[y % places][y // places] for y in range(len(self.made))]
        made, in_use = tuple(plan for plan, _ in found), tuple(used for _, used in found)
        return Plans(made, in_use, (self.age_steps + 1) % moving.every)

    def layers_of(self, place: int, places: int) -> range:
        """Return the MoE layers, counted from 0, that one of `places` ranks plans."""
        return range(place, len(self.made), places)

    def _next(self, layer: int, loads_PE: Ints, moving: ExpertMoving) -> tuple[Replication, bool]:
        before = self.made[layer]
        problem = ExpertProblem(
            placement=before.placement,
            replica_slots=before.replica_slots,
            loads=loads_PE,
            costs=moving.costs_of(layer),
            exact=moving.exact,
        )
        in_use = _harmless(before, problem)
        if self.age_steps:
            return before, in_use
        made = moving.planner(problem)
        return made, in_use and _harmless(made, problem)

    @property
    def hash64(self) -> int:
        """A hash of all plans and of the present replications, of 8 bytes."""
        found = hashlib.blake2b(digest_size=8)
        for replication in (*self.made, *self.replications):
            found.update(replication.digest.encode())
        return int.from_bytes(found.digest(), signed=True)

    @property
    def replications(self) -> tuple[Replication, ...]:
        """The replications of the next step."""
        pairs = zip(self.made, self.in_use, strict=True)
        return tuple(
            plan if in_use else Replication.none(plan.placement, plan.replica_slots) for plan, in_use in pairs
        )


def _harmless(plan: Replication, problem: ExpertProblem) -> bool:
    """Return whether a plan makes the layer no slower than no replicas would, by rank and link."""
    return plan.is_empty or pays(problem, plan)


def loads_of_group(loads_PYE: Loads, mesh: Mesh, rank: int) -> list[Ints]:
    """Return the rows that start on the ranks of this rank's expert group, by layer: [ranks, E].

    Ranks that share their experts count as one rank.
    """
    members, ranks = list(mesh.members(rank, Group.EXPERT_SHARDS)), mesh.size(Group.EXPERT)
    mine = loads_PYE[members].reshape(ranks, -1, *loads_PYE.shape[1:]).sum(axis=1, dtype=np.int64)
    return [mine[:, y] for y in range(mine.shape[1])]
