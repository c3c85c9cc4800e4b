"""Predictions against sums worked out by hand: with company and without, and with a rank that is slower."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.predict import ComputeTimes, PredictedCost, predict
from penstock.cost import AlphaBeta, FittedCluster, StepCost, Workload
from penstock.decision import Decision
from penstock.graph import Interval, Lane, Phase
from penstock.mesh import Mesh
from penstock.ops import Op
from penstock.plan.predict import company
from penstock.schedule import SCHEDULES, StepPlan, unit_cost
from penstock.simulate import Timeline
from penstock.step import StepShape, build_graph
from penstock.trace import TaskRecord
from tests.steps import lone_task, task_at

F, B = Phase.FORWARD, Phase.BACKWARD
ALL_REDUCE = "L1.AR.p0.B"
ATTENTION = "L0.AT.m0.B"

# ---- measured durations ------------------------------------------------------------------------------------

TABLES = {
    lone_task("L0.X.m0.c0.F"): [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
    lone_task("L0.X.m1.c0.F"): [[7.0, 8.0], [9.0, 10.0], [11.0, 12.0]],
    lone_task("L0.X.m0.c0.B"): [[30.0, 10.0], [20.0, 40.0], [60.0, 50.0]],
}
"""Three rounds, two ranks."""


@given(st.randoms(use_true_random=False))
def test_records_in_any_order_become_a_table_of_rounds_and_ranks(rng: random.Random) -> None:
    records = [
        TaskRecord(task, rank, 0.5, 0.5 + seconds, step=10 + number)
        for task, rounds in TABLES.items()
        for number, ranks in enumerate(rounds)
        for rank, seconds in enumerate(ranks)
    ]
    records += [TaskRecord(lone_task(ALL_REDUCE), rank, 0.0, 1.0, step=10) for rank in range(2)]
    rng.shuffle(records)
    found = ComputeTimes.from_records(records).seconds
    assert found.keys() == TABLES.keys(), "transfers are left out"
    for task, rounds in TABLES.items():
        assert found[task].tolist() == rounds


def test_a_round_that_lacks_a_task_is_no_table() -> None:
    task = lone_task(ATTENTION)
    records = [
        TaskRecord(task, 0, 0.0, 1.0, 0),
        TaskRecord(task, 1, 0.0, 1.0, 0),
        TaskRecord(task, 0, 0, 1, 1),
    ]
    with pytest.raises(KeyError):
        ComputeTimes.from_records(records)


def test_what_is_typical_is_the_median_over_pieces_rounds_and_ranks() -> None:
    found = ComputeTimes({task: np.array(rounds) for task, rounds in TABLES.items()}).typical()
    assert found == {(0, Op.EXPERTS, F): 6.5, (0, Op.EXPERTS, B): 35.0}


# ---- one task ----------------------------------------------------------------------------------------------


def plan_of(name: str, layers: int) -> StepPlan:
    """Dense layers: computation, an empty ST, and one all-reduce for every layer."""
    shape = StepShape(moe_layers=(False,) * layers, exchange_counts=False)
    graph = build_graph(shape)
    return StepPlan(graph, SCHEDULES[name].order(graph, unit_cost, Decision(schedule=name)), shape)


def transfers(shape: StepShape, seconds: float) -> StepCost:
    """Every all-reduce takes `seconds`."""
    link = AlphaBeta(alpha_s=seconds, beta_s_per_byte=0.0)
    work = Workload(
        batch=1,
        seq_len=1,
        hidden_size=1,
        ffn_hidden_size=1,
        vocab_size=1,
        num_experts=1,
        top_k=1,
        expert_matrices=2,
        capacity_factor=None,
        min_capacity=1,
        world_size=2,
        ep_size=2,
        element_bytes=4,
        all_reduce_bytes=(64,) * shape.num_layers,
        expert_all_reduce_bytes=(0,) * shape.num_layers,
    )
    return StepCost(shape, work, FittedCluster(dispatch=link, reduce=link))


def everywhere(plan: StepPlan, table: list[list[float]]) -> ComputeTimes:
    """The same durations [rounds][ranks] for all compute tasks."""
    return ComputeTimes({t: np.array(table) for t in plan.graph.tasks if t.lane is Lane.COMPUTE})


def cost_of(
    plan: StepPlan, *, reduce_s: float, slowed: float, alone_s: float, beside: list[list[float]]
) -> PredictedCost:
    alone = everywhere(plan, [[alone_s] * len(beside[0])] * len(beside))
    return PredictedCost(transfers(plan.shape, reduce_s), alone, everywhere(plan, beside), slowed)


SCATTERED = [[2.0, 1.0], [1.25, 1.75]]
"""Beside traffic, [rounds][ranks]: 1.5 is typical; rank 0 is slower in round 0, rank 1 in round 1."""


@given(st.floats(0, 1))
def test_a_task_costs_what_its_share_of_company_says(share: float) -> None:
    plan = plan_of("flowmoe", 2)
    cost = cost_of(plan, reduce_s=2.0, slowed=1.5, alone_s=1.0, beside=SCATTERED)
    attention, all_reduce = (task_at(plan.graph, name) for name in (ATTENTION, ALL_REDUCE))
    assert cost.seconds(attention, share) == pytest.approx(1.0 + 0.5 * share)
    assert cost.seconds(all_reduce, share) == pytest.approx(2.0 + 1.0 * share)
    assert cost(attention) == 1.5 and cost(all_reduce) == 3.0, "orders are made for full company"


@given(st.floats(0, 1), st.integers(0, 1))
def test_ranks_scatter_as_much_as_they_have_company(share: float, number: int) -> None:
    plan = plan_of("flowmoe", 2)
    cost = cost_of(plan, reduce_s=2.0, slowed=1.5, alone_s=1.0, beside=SCATTERED)
    attention, all_reduce = (task_at(plan.graph, name) for name in (ATTENTION, ALL_REDUCE))
    typical_s = cost.seconds(attention, share)
    wanted = [typical_s * (1 + share * (seconds / 1.5 - 1)) for seconds in SCATTERED[number]]
    assert np.asarray(cost.drawn(attention, share, number)).tolist() == pytest.approx(wanted)
    assert cost.drawn(all_reduce, share, number) == cost.seconds(all_reduce, share)


def test_alone_nothing_scatters_and_in_full_company_the_round_is_as_measured() -> None:
    plan = plan_of("flowmoe", 2)
    cost = cost_of(plan, reduce_s=2.0, slowed=1.5, alone_s=1.0, beside=SCATTERED)
    attention = task_at(plan.graph, ATTENTION)
    assert cost.rounds == 2
    for number, ranks in enumerate(SCATTERED):
        assert np.asarray(cost.drawn(attention, 0.0, number)).tolist() == [1.0, 1.0]
        assert np.asarray(cost.drawn(attention, 1.0, number)).tolist() == pytest.approx(ranks)


# ---- company -----------------------------------------------------------------------------------------------


def test_shares_of_a_timeline() -> None:
    spans = {
        "L0.AT.m0.F": (0.0, 4.0),  # the dispatch covers its last quarter
        "L0.AT.m1.F": (4.0, 6.0),  # the dispatch and the next one all of it
        "L0.X.m0.c0.F": (7.0, 11.0),  # two transfers, a quarter each
        "L0.U.m0.F": (20.0, 21.0),  # nobody
        "L0.D.m0.c0.F": (3.0, 5.0),
        "L0.D.m1.c0.F": (5.0, 8.0),  # computation for one and one of three
        "L0.C.m0.c0.F": (10.0, 12.0),
        "L0.ST.F": (20.5, 20.5),  # an instant has no time in which others could be busy
    }
    times = {
        lone_task(name): Interval(np.array([start, 99.0]), np.array([end, 100.0]))
        for name, (start, end) in spans.items()
    }
    shares = company(Timeline(times, Mesh(world_size=2, ep_size=2)))
    assert {str(task): share for task, share in shares.items()} == pytest.approx(
        {
            "L0.AT.m0.F": 0.25,
            "L0.AT.m1.F": 1.0,
            "L0.X.m0.c0.F": 0.5,
            "L0.U.m0.F": 0.0,
            "L0.D.m0.c0.F": 1.0,
            "L0.D.m1.c0.F": 2 / 3,
            "L0.C.m0.c0.F": 0.5,
            "L0.ST.F": 0.0,
        }
    )


# ---- whole steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [[[2.0]], [[2.0], [7.0]]])
def test_a_step_without_overlap_is_a_sum_of_what_was_measured_alone(beside: list[list[float]]) -> None:
    """Forward and backward of EM, AT and HD, one after another, then the all-reduce."""
    plan = plan_of("sequential", 1)
    cost = cost_of(plan, reduce_s=4.0, slowed=1.5, alone_s=1.0, beside=beside)
    assert predict(plan, cost, Mesh()) == 6 * 1.0 + 4.0


def test_a_step_in_which_two_tasks_have_company() -> None:
    """Layer 1's all-reduce takes 2 s alone and 3 s here, as long as the two tasks of 1.5 s beside it.

    Alone: EM, AT, AT, HD forward, HD and AT backward, then at the end the all-reduce of layer 0.
    """
    plan = plan_of("flowmoe", 2)
    cost = cost_of(plan, reduce_s=2.0, slowed=1.5, alone_s=1.0, beside=[[1.5]])
    assert predict(plan, cost, Mesh()) == pytest.approx(6 * 1.0 + 3.0 + 2.0)


def test_the_slower_rank_of_every_round_counts() -> None:
    """As above, but the two tasks take 2 + 2 s on rank 0 in round 0, and 1.75 + 1.75 s on rank 1 in round 1.

    What has no company does not scatter. The mean is of rounds of 12 and 11.5 s, not of ranks.
    """
    plan = plan_of("flowmoe", 2)
    cost = cost_of(plan, reduce_s=2.0, slowed=1.5, alone_s=1.0, beside=SCATTERED)
    mesh = Mesh(world_size=2, ep_size=2)
    assert predict(plan, cost, mesh) == pytest.approx((6 + 4.0 + 2.0 + 6 + 3.5 + 2.0) / 2)


def test_company_depends_on_durations_that_depend_on_company() -> None:
    """An all-reduce of 1 s beside a task that takes 1 s more of its time: d = 1 + 1 / d, the golden ratio."""
    plan = plan_of("flowmoe", 2)
    cost = cost_of(plan, reduce_s=1.0, slowed=1.0, alone_s=1.0, beside=[[2.0]])
    golden = (1 + 5**0.5) / 2
    assert predict(plan, cost, Mesh()) == pytest.approx(6 * 1.0 + golden + 1.0 + 1.0, abs=0.03)
