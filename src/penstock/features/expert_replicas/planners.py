"""Planners of replicas by name, and whether a plan still pays.

A planner makes, from the loads of one step, the replication of the next. All ranks run it on the same
integers and compare a hash of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.features.expert_replicas.evening import least_loaded, planned
from penstock.features.expert_replicas.model import layer_seconds
from penstock.features.expert_replicas.problem import ExpertProblem
from penstock.features.expert_replicas.published import pro_prophet, shadowing
from penstock.placement import Replication
from penstock.routing.integers import Ints

Planner = Callable[[ExpertProblem], Replication]

PLANNERS: Final[dict[str, Planner]] = {
    "pro_prophet": pro_prophet,
    "shadowing": shadowing,
    "least_loaded": least_loaded,
    "planned": planned,
}


class PlanningCost(NamedTuple):
    """Seconds of a home thread for one layer: a fixed part, a part per rank, a part per load of a rank."""

    fixed_s: float
    rank_s: float
    load_s: float


PLANNING: Final[dict[str, PlanningCost]] = {
    "pro_prophet": PlanningCost(5e-4, 4e-5, 1.5e-6),
    "shadowing": PlanningCost(1.5e-4, 2e-5, 1e-6),
    "least_loaded": PlanningCost(2e-4, 1e-4, 2e-6),
    "planned": PlanningCost(2e-3, 7e-4, 2e-6),
}
"""Times of a 2 GHz core where loads are uneven, to a factor of two. They are constants, since measured ones
would make predictions of one and the same step differ. Replica slots change a planner's time less than its
loads do."""


def find_planner(name: str) -> Planner:
    """Return a planner by its name. Raises ValueError for an unknown name."""
    if name not in PLANNERS:
        raise ValueError(f"no planner of experts is called {name!r}; there are {', '.join(PLANNERS)}")
    return PLANNERS[name]


def planning_s(name: str, ranks: int, experts: int) -> float:
    """Return the seconds that a planner is assumed to need for one layer of an expert group."""
    cost = PLANNING[name]
    return cost.fixed_s + ranks * (cost.rank_s + experts * cost.load_s)


def pays(problem: ExpertProblem, replication: Replication) -> bool:
    """Return whether a replication makes the layer faster than none, by rank and link, with the problem's
    loads.

    A plan from stale loads may not: ask again once the loads of the step are known, and drop it if so.
    """
    if replication.is_empty:
        return False
    none = Replication.none(replication.placement, replication.replica_slots)
    return layer_seconds(problem, replication).total_s < layer_seconds(problem, none).total_s


def overlap(before: Ints, after: Ints) -> float:
    """Return the share of rows that two steps have in common, by rank and expert: 1 = the same distribution,
    0 = no row in common.

    Pro-Prophet's locality: a plan from one step serves the next as far as their loads resemble each other.
    """
    totals = before.sum() or 1, after.sum() or 1
    difference = abs(before / totals[0] - after / totals[1]).sum()
    return float(1 - difference / 2)
