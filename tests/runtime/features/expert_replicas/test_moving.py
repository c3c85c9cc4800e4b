"""Replicas planned from loads: on ranks against the reference, and when plans are kept or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.features.expert_replicas.planners import PLANNERS
from penstock.features.expert_replicas.prices import planned_replications
from penstock.features.expert_replicas.problem import ExpertProblem
from penstock.mesh import Mesh
from penstock.placement import EMPTY, ExpertPlacement, Replication
from penstock.runtime import TaskError
from penstock.runtime.features.expert_replicas.manager import (
    ExpertMoving,
    ExpertReplicas,
    Plans,
    loads_of_group,
)
from tests.features.problems import costs_of
from tests.support.cases import ROUTINGS, hosting_case
from tests.support.parity import Case, own_batch
from tests.support.ranks import Pools
from tests.support.replicas import RandomReplicas, check_hosted, stack_with_replicas

EVEN = ExpertPlacement.even(4, 2)
COSTS = costs_of((0, 1), row_s=1e-3, expert_bytes=1e3)
"""Of experts so small that whatever evens loads pays."""
HOT, COLD = np.array([[0, 40, 2, 2], [0, 40, 2, 2]]), np.array([[2, 2, 0, 40], [2, 2, 0, 40]])


def planner(problem: ExpertProblem) -> Replication:
    """The most loaded expert is a replica of the other rank."""
    expert = int(problem.expert_rows.argmax())
    replicas = [[EMPTY], [EMPTY]]
    replicas[1 - EVEN.owners[expert]] = [expert]
    return Replication.local(EVEN, replicas)


def hosted_after(steps: Sequence[np.ndarray[Any, Any]], every: int = 1) -> list[tuple[int, ...]]:
    """The replicas of both ranks after each step of one layer with these loads."""
    moving = ExpertMoving(planner=planner, costs=COSTS, every=every)
    plans, found = Plans.none([Replication.none(EVEN, 1)]), []
    for loads_PE in steps:
        plans = plans.after([loads_PE], moving)
        (replication,) = plans.replications
        found.append(tuple(replica for (replica,) in replication.replicas))
    return found


def test_a_step_has_the_replicas_that_the_loads_of_the_one_before_ask_for() -> None:
    assert hosted_after([HOT, HOT]) == [(EMPTY, 1), (EMPTY, 1)]


def test_while_loads_do_not_last_nothing_is_hosted_and_when_they_last_again_it_is() -> None:
    found = hosted_after([HOT, COLD, HOT, COLD, COLD, COLD])
    nothing = (EMPTY, EMPTY)
    assert found == [(EMPTY, 1), nothing, nothing, nothing, (3, EMPTY), (3, EMPTY)]


def test_plans_are_made_after_every_so_many_steps_and_judged_after_each() -> None:
    nothing, hot = (EMPTY, EMPTY), (EMPTY, 1)
    found = hosted_after([HOT, COLD, HOT, COLD, COLD], every=3)
    assert found == [hot, nothing, hot, nothing, (3, EMPTY)]
    with pytest.raises(ValueError, match="every = 0: experts are planned after 1 step or more"):
        ExpertMoving(planner=planner, costs=COSTS, every=0)


def test_a_new_plan_that_its_own_loads_do_not_pay_for_is_not_hosted() -> None:
    """Its planner may price links otherwise: here it asks no price at all."""
    dear = ExpertMoving(planner=planner, costs=costs_of((0, 1), row_s=1e-9, expert_bytes=1e9))
    plans = Plans.none([Replication.none(EVEN, 1)]).after([HOT], dear)
    assert not plans.made[0].is_empty and plans.replications[0].is_empty
    assert planned_replications(np.stack([HOT]), "least_loaded", 1, EVEN, [dear.costs])[0].is_empty


def test_loads_are_those_of_the_own_expert_group_by_expert_holder() -> None:
    loads_PYE = np.arange(8 * 2 * 3, dtype=np.int32).reshape(8, 2, 3)
    mesh = Mesh(world_size=8, ep_size=2, etp_size=2)
    found = loads_of_group(loads_PYE, mesh, 5)
    assert len(found) == 2
    assert found[1].tolist() == [
        (loads_PYE[4, 1] + loads_PYE[5, 1]).tolist(),
        (loads_PYE[6, 1] + loads_PYE[7, 1]).tolist(),
    ]


def test_replications_have_a_hash() -> None:
    none, some = Replication.none(EVEN, 1), Replication.local(EVEN, [[2], [EMPTY]])
    hashes = {Plans.none([replication]).hash64 for replication in (none, some)}
    assert len(hashes) == 2 and Plans.none([some]).hash64 in hashes
    assert Plans((some,), (False,)).hash64 not in hashes


def tables(rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """Loads of three layers, with many ties."""
    return [rng.integers(0, high, (4, 8)) * 16 for high in (2, 4, 200)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNERS)
def test_ranks_find_the_same_together_as_one_alone_whatever_ties_there_are(name: str) -> None:
    """However many share the layers, and however a rank's copy lies in memory."""
    rng, moving = np.random.default_rng(0), small(4, name)
    plans = Plans.none([Replication.none(ExpertPlacement.even(8, 4), 2)] * 3)
    for number in range(24):
        loads = tables(rng)
        alone = plans.after(loads, moving)
        places = 1 + number % 4
        copies = [np.asfortranarray(each) for each in loads]
        shares = [plans.share(copies, moving, place, places) for place in range(places)]
        assert sum(map(len, shares)) == 3
        assert plans.joined(shares, moving) == alone
        plans = alone
    assert not all(replication.is_empty for replication in plans.made)


# ---- on ranks ----------------------------------------------------------------------------------------------


def skewed(world_size: int, schedule: str) -> Case:
    step = hosting_case(world_size, ROUTINGS[0], schedule)
    return replace(step, busy_experts=(1, 2), idle_expert=5)


def small(world_size: int, name: str) -> ExpertMoving:
    links = costs_of(tuple(range(world_size))).links
    return ExpertMoving(planner=PLANNERS[name], costs=replace(COSTS, links=links))


@pytest.mark.parametrize(("world_size", "name"), [(2, "planned"), (4, "pro_prophet")])
def test_planned_replicas_change_nothing_but_speed(ranks: Pools, world_size: int, name: str) -> None:
    hosts = RandomReplicas(slots=2, steps=4, moving=small(world_size, name))
    check_hosted(ranks, skewed(world_size, "flowmoe"), hosts)


def hosted_and_computed(rank: int, case: Case, hosts: RandomReplicas) -> tuple[list[str], list[bool]]:
    """After two steps: digests of the present replications next, and whether ranks have replicas. A step's
    loads have the replicas that it ran with."""
    stack = stack_with_replicas(rank, case, hosts)
    for _ in range(2):
        found = [
            replication for replication in stack.of(ExpertReplicas).replications if replication is not None
        ]
        stack(*own_batch(rank, case)).backward()
        assert stack.loads.replications == tuple(found)
    found = [replication for replication in stack.of(ExpertReplicas).replications if replication is not None]
    return [replication.digest for replication in found], [replication.is_empty for replication in found]


def test_all_ranks_have_the_same_replicas_and_some(ranks: Pools) -> None:
    hosts = RandomReplicas(slots=2, steps=3, moving=small(2, "least_loaded"))
    (digests, empty), others = ranks(2).run(hosted_and_computed, skewed(2, "penstock"), hosts)
    assert digests == others[0]
    assert not all(empty)


def disagreeing(rank: int, case: Case) -> None:
    """A step of ranks one of which has another planner."""
    stack = stack_with_replicas(rank, case, RandomReplicas(moving=small(2, "least_loaded")))
    if rank:
        stack.of(ExpertReplicas).moving = None
    stack(*own_batch(rank, case)).backward()


def test_ranks_that_plan_different_replicas_are_told(ranks: Pools) -> None:
    for text in ranks(2).told(TaskError, disagreeing, skewed(2, "sequential")):
        assert "L0.PH.B" in text and "hold others than it does, or plan in another way" in text
    ranks(2).close()
