"""Which experts ranks host next: planned from the loads of one step, and dropped where plans do not last.

A plan is made for the loads that it was made from, and runs with those of the next step. So every plan is
judged by the loads of the step after it, whether it ran or not: while it would have been slower than no
guests at all, none are hosted, and when plans hold again, they are.

Shapes: P ranks of the world, Y MoE layers, E experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.mesh import Group, Mesh
from penstock.placement import Hosting
from penstock.placing.experts import Planner, pays
from penstock.placing.integers import Ints
from penstock.placing.problem import ExpertCosts, ExpertProblem
from penstock.runtime.loads import Loads


@dataclass(frozen=True, kw_only=True)
class ExpertMoving:
    """How a stack decides which experts are whose guests.

    planner: from the loads of a layer to what its ranks host. costs: what rows and weights cost, the same on
    all ranks. every: the number of steps from one plan to the next; plans are judged after each. exact:
    whether rows are split by the loads of their own step.
    """

    planner: Planner
    costs: ExpertCosts
    every: int = 1
    exact: bool = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every = {self.every}: experts are planned after 1 step or more. Use 1")


@dataclass(frozen=True)
class Plans:
    """What was planned last, by MoE layer, and which of it is hosted.

    age_steps: since it was planned; 0 = plan again.
    """

    made: tuple[Hosting, ...]
    hosted: tuple[bool, ...]
    age_steps: int = 0

    @staticmethod
    def none(hostings: Sequence[Hosting]) -> Plans:
        """Before the first step, with what ranks host then."""
        return Plans(tuple(hostings), (True,) * len(hostings))

    def after(self, loads_YPE: Sequence[Ints], moving: ExpertMoving) -> Plans:
        """What to host after a step with these loads, [P, E] of each layer."""
        pairs = zip(self.made, loads_YPE, strict=True)
        problems = [_problem(plan, loads_PE, moving) for plan, loads_PE in pairs]
        lasted = tuple(map(_lasted, self.made, problems))
        made = self.made if self.age_steps else tuple(map(moving.planner, problems))
        return Plans(made, lasted, (self.age_steps + 1) % moving.every)

    @property
    def hash64(self) -> int:
        """A hash of all of it, of 8 bytes."""
        found = hashlib.blake2b(digest_size=8)
        for hosting in (*self.made, *self.hostings):
            found.update(hosting.digest.encode())
        return int.from_bytes(found.digest(), signed=True)

    @property
    def hostings(self) -> tuple[Hosting, ...]:
        """What the next step hosts."""
        pairs = zip(self.made, self.hosted, strict=True)
        return tuple(
            plan if hosted else Hosting.none(plan.placement, plan.guest_slots) for plan, hosted in pairs
        )


def _lasted(plan: Hosting, problem: ExpertProblem) -> bool:
    """Whether a plan does no harm with loads that it was not made from."""
    return plan.is_empty or pays(problem, plan)


def _problem(plan: Hosting, loads_PE: Ints, moving: ExpertMoving) -> ExpertProblem:
    return ExpertProblem(
        placement=plan.placement,
        guest_slots=plan.guest_slots,
        loads=loads_PE,
        costs=moving.costs,
        exact=moving.exact,
    )


def loads_of_group(loads_PYE: Loads, mesh: Mesh, rank: int) -> list[Ints]:
    """Rows that start on the ranks of this rank's expert group, by layer: [ranks, E].

    Ranks that share their experts are one rank there.
    """
    members, ranks = list(mesh.members(rank, Group.EXPERT_SHARDS)), mesh.size(Group.EXPERT)
    mine = loads_PYE[members].reshape(ranks, -1, *loads_PYE.shape[1:]).sum(axis=1, dtype=np.int64)
    return [mine[:, y] for y in range(mine.shape[1])]
