"""Every planner: replications are valid, account for all rows, never lose by their own model, and are the
same everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.expert_replicas.encoding import (
    numbers_of,
    plain_of,
    replication_of,
    share_of,
    told_bytes,
)
from penstock.features.expert_replicas.planners import PLANNERS, Ways, overlap, pays, planning_s
from penstock.features.expert_replicas.problem import ExpertProblem, LayerLoad, layer_seconds
from penstock.placement import EMPTY, SPLIT, ExpertPlacement, Replication
from penstock.routing.replicas import Tier, matched
from penstock.routing.sizes import Ints
from tests.features.problems import costs_of, expert_problems, skewed_loads
from tests.support.replicas import random_replication

NODES = (0,) * 4 + (1,) * 4 + (2,) * 4 + (3,) * 4


def none_of(problem: ExpertProblem) -> Replication:
    return Replication.none(problem.placement, problem.replica_slots)


def skewed(seed: int = 0, replica_slots: int = 1, byte_s: float = 1e-11) -> ExpertProblem:
    """3 of 16 experts have over half of the rows; 4 nodes of 4 ranks."""
    loads = skewed_loads(np.random.default_rng(seed), 16, 16)
    placement = ExpertPlacement.even(16, 16)
    costs = costs_of(NODES, byte_s=byte_s)
    return ExpertProblem(placement=placement, replica_slots=replica_slots, loads=loads, costs=costs)


@given(problem=expert_problems(), name=st.sampled_from(list(PLANNERS)))
def test_all_rows_are_computed_once(problem: ExpertProblem, name: str) -> None:
    """That a replication is valid it checks itself."""
    replication = PLANNERS[name](problem)
    load = LayerLoad.of(problem.loads, replication)
    assert load.computed.sum() == pytest.approx(problem.loads.sum())
    assert load.traffic.sum(axis=1) == pytest.approx(problem.loads.sum(axis=1))


@given(problem=expert_problems())
def test_the_best_plan_is_never_slower_than_none(problem: ExpertProblem) -> None:
    """By rank and link, up to the parts of SPLIT into which rows can be divided."""
    none_s = layer_seconds(problem, none_of(problem)).total_s
    assert layer_seconds(problem, PLANNERS["planned"](problem)).total_s <= 1.001 * none_s


@pytest.mark.parametrize("name", PLANNERS)
def test_even_loads_and_no_loads_need_no_replicas(name: str) -> None:
    for rows in (0, 64):
        loads = np.full((16, 16), rows)
        placement = ExpertPlacement.even(16, 16)
        slow = costs_of(NODES, byte_s=1e-7)
        problem = ExpertProblem(placement=placement, replica_slots=2, loads=loads, costs=slow)
        assert PLANNERS[name](problem).is_empty


def imbalance(load: LayerLoad) -> float:
    """The largest load of a rank over the mean."""
    return float(load.computed.max() / load.computed.mean())


@pytest.mark.parametrize(("replica_slots", "most"), [(1, 1.1), (2, 1.05)])
def test_loads_become_even(replica_slots: int, most: float) -> None:
    """Top 3 of 16 experts over half of the rows: the fullest rank had 2.7 times the mean and more."""
    for seed in range(4):
        problem = skewed(seed, replica_slots)
        assert imbalance(LayerLoad.of(problem.loads, none_of(problem))) > 2.7
        assert imbalance(LayerLoad.of(problem.loads, PLANNERS["planned"](problem))) < most


def test_planners_differ_as_their_papers_say() -> None:
    """Shadowing copies an expert to all other ranks, Pro-Prophet to some, for rows of their own alone."""
    problem = skewed()
    shadowed, prophet = (PLANNERS[name](problem) for name in ("shadowing", "pro_prophet"))
    hottest = int(problem.expert_rows.argmax())
    assert [rank for rank, held in enumerate(shadowed.replicas) if held != (hottest,)] == [hottest]
    assert shadowed == Replication.local(problem.placement, shadowed.replicas)
    assert prophet.replicas not in (shadowed.replicas, none_of(problem).replicas)
    assert prophet == Replication.local(problem.placement, prophet.replicas)
    none_s = layer_seconds(problem, none_of(problem)).total_s
    planned_s = layer_seconds(problem, PLANNERS["planned"](problem)).total_s
    assert planned_s < layer_seconds(problem, prophet).total_s < none_s


def test_on_slow_links_weights_stay_where_they_are() -> None:
    """An expert of 100 MB for some hundred rows: no planner that asks the price moves it."""
    problem = skewed()
    dear = costs_of(NODES, byte_s=1e-6, expert_bytes=1e8)
    priced = ExpertProblem(placement=problem.placement, replica_slots=1, loads=problem.loads, costs=dear)
    for name in ("planned", "pro_prophet", "shadowing"):
        assert PLANNERS[name](priced).is_empty, name


def test_slots_that_are_left_are_filled_as_far_as_that_is_hidden() -> None:
    """Experts that turn hot unforeseen then have homes, where rows are split by their own loads."""
    problem = skewed(replica_slots=2, byte_s=1e-12)
    replication, by_plan = (PLANNERS["planned"](replace(problem, exact=exact)) for exact in (True, False))
    filled, left = (
        sum(replica == EMPTY for held in each.replicas for replica in held) for each in (replication, by_plan)
    )
    assert filled == 0 < left
    turned = problem.loads[:, ::-1]
    served = imbalance(LayerLoad.of(turned, replication, NODES))
    assert served < 0.7 * imbalance(LayerLoad.of(turned, replace(by_plan, limit=SPLIT), NODES))
    exposed = replace(problem.costs, forward_slack_s=0.0, backward_slack_s=0.0)
    bare = PLANNERS["planned"](replace(problem, costs=exposed))
    assert any(EMPTY in held for held in bare.replicas)


@pytest.mark.parametrize("exact", [True, False])
def test_flows_that_are_worked_out_in_parts_lead_to_the_same_plan(
    monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    problem = replace(skewed(replica_slots=2), exact=exact)
    whole = PLANNERS["planned"](problem)
    sizes: list[int] = []

    def noting(left_CJS: Ints, room_CJP: Ints, near: Sequence[Tier]) -> Ints:
        sizes.append(left_CJS.shape[1])
        return matched(left_CJS, room_CJP, near)

    monkeypatch.setattr("penstock.features.expert_replicas.builder.matched", noting)
    monkeypatch.setattr("penstock.features.expert_replicas.builder.MOST_FLOWS", 2 * 16**2)
    assert PLANNERS["planned"](problem) == whole and not whole.is_empty
    assert set(sizes) == {1, 2}


def test_a_stale_plan_is_noticed() -> None:
    """It serves the loads that it was made from, not even ones, where weights travel for nothing."""
    problem = skewed(byte_s=1e-9)
    replication = PLANNERS["pro_prophet"](problem)
    assert pays(problem, replication)
    exposed = replace(problem.costs, forward_slack_s=0.0, backward_slack_s=0.0)
    assert not pays(replace(problem, loads=np.full((16, 16), 256), costs=exposed), replication)
    assert not pays(problem, none_of(problem))


def test_overlap_of_two_steps() -> None:
    loads = np.array([[30, 10], [0, 0]])
    assert overlap(loads, 3 * loads) == 1.0
    assert overlap(loads, loads[:, ::-1]) == pytest.approx(0.5)
    assert overlap(loads, loads[::-1]) == 0.0
    assert overlap(0 * loads, 0 * loads) == 1.0


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"loads \(2, 3\) and nodes of 2 ranks: the placement has 2 ranks and 4 "
    ):
        ExpertProblem(
            placement=ExpertPlacement.even(4, 2),
            replica_slots=1,
            loads=np.zeros((2, 3), np.int64),
            costs=costs_of((0, 1)),
        )


@given(problem=expert_problems())
def test_the_best_plan_is_never_slower_than_an_even_one(problem: ExpertProblem) -> None:
    """Also where links are so slow that no single replica pays, and all together do."""
    best_s, even_s = (
        layer_seconds(problem, PLANNERS[name](problem)).total_s for name in ("planned", "least_loaded")
    )
    assert best_s <= 1.001 * even_s


@pytest.mark.parametrize("name", PLANNERS)
def test_more_ranks_and_experts_take_longer_to_plan(name: str) -> None:
    sizes = [(2, 2), (4, 4), (4, 16), (16, 16), (16, 64), (64, 64)]
    seconds = [planning_s(name, *each) for each in sizes]
    assert seconds[0] > 0 and seconds == sorted(set(seconds))


# ---- what ranks tell each other ----------------------------------------------------------------------------


EVEN = ExpertPlacement.even(6, 3)


def replications() -> st.SearchStrategy[Replication]:
    """Some with a limit."""

    def drawn(seed: int, limit: int | None) -> Replication:
        return replace(random_replication(EVEN, 1 + seed % 2, Random(seed)), limit=limit)

    return st.builds(drawn, st.integers(0, 2**32 - 1), st.none() | st.just(SPLIT + 1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.booleans())
def test_what_is_told_is_read(seed: int, slots: int, in_use: bool) -> None:
    random = Random(seed)
    known = [Replication.none(EVEN, slots), random_replication(EVEN, slots, random)]
    share = ((random_replication(EVEN, slots, random), in_use), (known[1], not in_use))
    found = share_of(numbers_of(share, known), known)
    assert found == share and found[1][0] is known[1]


@given(replications())
def test_what_a_file_says_is_read(replication: Replication) -> None:
    assert replication_of(json.loads(json.dumps(plain_of(replication))), EVEN) == replication


@given(replications())
def test_the_price_is_of_what_is_told(replication: Replication) -> None:
    assert told_bytes(replication) == numbers_of(((replication, True),), [Replication.none(EVEN, 1)]).nbytes


def test_replicas_for_rows_of_their_own_ranks_take_few_bytes() -> None:
    local = Replication.local(EVEN, [[2], [4], [0]])
    assert numbers_of(((local, True),), [Replication.none(EVEN, 1)]).nbytes == 4 * (3 + 3)
    assert not numbers_of((), []).size


# ---- one more copy -----------------------------------------------------------------------------------------


UNEVEN_NODES = (0, 0, 0, 1, 1, 2)


@pytest.mark.parametrize("card_per_rank", [False, True])
@given(st.integers(0, 2**32 - 1))
def test_one_by_one_as_all_at_once(card_per_rank: bool, seed: int) -> None:
    links, rng = (
        replace(costs_of(UNEVEN_NODES).links, card_per_rank=card_per_rank),
        np.random.default_rng(seed),
    )
    copies = rng.integers(0, 3, (6, 6)) * (1 - np.eye(6, dtype=np.int64))
    ways = Ways(links, copies)
    for _ in range(6):
        owner, home = map(int, rng.choice(6, 2, replace=False))
        copies[owner, home] += 1
        assert ways.with_one_more(owner, home) == links.seconds(copies)
        ways.add(owner, home)
