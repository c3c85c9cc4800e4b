"""Costs read off a run: medians, and for a collective the rank that came last."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import AlphaBeta, MeasuredCost, ProfiledCluster, Span, StepCost
from penstock.cost.cluster import Inside, RateOf
from penstock.cost.cluster_file import LinkModel, MoveModel, TaskModel
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Lane, Phase, Task
from penstock.mesh import Group, Mesh, Seconds
from penstock.ops import Op
from penstock.schedule import SCHEDULES
from penstock.step import StepShape
from penstock.timing import lower_bound, simulate, slowest
from penstock.trace import TaskRecord
from tests.cost.test_clusters import HERE
from tests.cost.test_step import workload
from tests.steps import lone_task


def record(name: str, rank: int, duration_s: float, *, step: int = 0) -> TaskRecord:
    return TaskRecord(lone_task(name), rank, 8.0, 8.0 + duration_s, step)


def measured(*records: TaskRecord, ep_size: int = 4) -> MeasuredCost:
    mesh = Mesh(world_size=4, ep_size=ep_size)
    return MeasuredCost.from_records(records, lambda task: -1.0, mesh)


def test_a_collective_costs_what_the_last_rank_to_arrive_sees() -> None:
    for name in ("L0.D.m0.c0.F", "L0.N.m0.F", "L0.ST.F", "L0.AR.p0.B", "L0.XR.p0.B"):
        ep_size = 1 if lone_task(name).axes == Group.EXPERT_DATA else 4
        cost = measured(record(name, 0, 5.0), record(name, 1, 2.0), record(name, 2, 3.0), ep_size=ep_size)
        assert cost(lone_task(name)) == 2.0


def test_the_slowest_of_several_groups_counts() -> None:
    """In every group the last rank to arrive; all others wait for the group."""
    name = "L0.D.m0.c0.F"
    records = [record(name, rank, seconds) for rank, seconds in enumerate((1.0, 4.0, 9.0, 3.0))]
    cost = measured(*records, ep_size=2)
    assert cost(lone_task(name)) == 3.0
    assert np.array_equal(cost.on_ranks(lone_task(name)), (1.0, 1.0, 3.0, 3.0))


def test_a_computation_costs_what_it_costs_on_the_slowest_rank() -> None:
    """A rank that is slow in every step counts; a single slow step does not."""
    name = "L0.AT.m0.F"
    slow = [record(name, 0, 5.0, step=step) for step in range(3)]
    disturbed = [record(name, 1, seconds, step=step) for step, seconds in enumerate((2.0, 90.0, 2.0))]
    assert measured(*slow, *disturbed)(lone_task(name)) == 5.0


def test_steps_are_taken_apart_before_the_minimum() -> None:
    """The fastest rank of one step says nothing about another step."""
    name = "L0.D.m0.c0.F"
    steps = [record(name, rank, 1.0 + step + rank, step=step) for step in range(3) for rank in range(2)]
    assert measured(*steps)(lone_task(name)) == 2.0


@given(st.lists(st.integers(1, 100), min_size=1), st.randoms(use_true_random=False))
def test_the_median_of_a_kind_does_not_depend_on_the_order_of_records(
    ticks: list[int], rng: random.Random
) -> None:
    records = [record(f"L0.X.m0.c{chunk}.B", 0, tick) for chunk, tick in enumerate(ticks)]
    rng.shuffle(records)
    assert measured(*records)(lone_task("L0.X.m0.c0.B")) == median(ticks)


def test_layers_ops_and_phases_are_different_kinds() -> None:
    names = ("L0.AT.m0.F", "L0.AT.m0.B", "L1.AT.m0.F", "L0.U.m0.F")
    cost = measured(*(record(name, 0, float(i)) for i, name in enumerate(names)))
    assert [cost(lone_task(name)) for name in names] == [0.0, 1.0, 2.0, 3.0]


def test_a_piece_that_never_ran_costs_what_its_kind_does() -> None:
    cost = measured(record("L0.AR.p0.B", 0, 2.0))
    assert cost(lone_task("L0.AR.p5.B")) == 2.0


def test_a_kind_that_never_ran_costs_what_the_fallback_says() -> None:
    cost = MeasuredCost.from_records([record("L0.AT.m0.F", 0, 1.0)], lambda task: float(task.layer), Mesh())
    assert cost(lone_task("L3.AT.m0.F")) == 3.0


def test_ranks_that_are_slow_in_different_layers_do_not_lengthen_the_bound() -> None:
    """What no order of the tasks beats, of a step's own records, is not above that step."""
    shape = StepShape(moe_layers=(True,) * 4, microbatches=4)
    graph = build_graph(shape)
    uneven = {0: np.array([0.2, 1.8]), 1: np.array([1.8, 0.2])}
    mesh = Mesh(world_size=2, ep_size=2)

    def cost(task: Task) -> float | Seconds:
        return uneven[task.layer % 2] if task.op == Op.EXPERTS else 0.1

    order = SCHEDULES["flowmoe"].order(graph, cost, Decision(schedule="flowmoe", microbatches=4))
    timeline = simulate(order, graph, cost, mesh)
    found = MeasuredCost.from_records(timeline.records(), lambda task: -1.0, mesh)
    busiest_s = sum(slowest(found(task)) for task in graph.tasks if task.lane is Lane.COMPUTE)
    least_s = lower_bound(graph, found.on_ranks, mesh).seconds
    assert least_s == pytest.approx(lower_bound(graph, cost, mesh).seconds)
    assert least_s <= timeline.iteration_s < busiest_s


# ---- links of other sizes ----------------------------------------------------------------------------------


def link_of(collective: str, group: str, lane: str, ranks: int, alpha_ms: float) -> LinkModel:
    return LinkModel(
        collective=collective,
        group=group,
        lane=lane,
        ranks=ranks,
        alpha_s=alpha_ms * 1e-3,
        beta_s_per_byte=7e-11,
    )


TESTBED_B = replace(
    find_cluster("fsmoe-testbed-b"),
    links=(
        link_of("all_to_all", "ep", "inter", 8, 0.175),
        link_of("all_gather", "node", "intra", 4, 0.032),
        link_of("reduce_scatter", "node", "intra", 4, 0.0391),
        link_of("all_reduce", "world", "inter", 8, 0.0837),
    ),
)
"""Its rates, and the lines of one rank per node, as they might have been link_of."""

INSIDE: dict[str, Inside] = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}
SIZES = {"all_to_all": 8, "all_reduce": 8, "all_gather": 4, "reduce_scatter": 4}


def line(cluster: ProfiledCluster, collective: str, ranks: int) -> AlphaBeta:
    if collective in INSIDE:
        return cluster.inside(INSIDE[collective], ranks)
    return cluster.all_to_all(ranks) if collective == "all_to_all" else cluster.all_reduce(ranks)


@pytest.mark.parametrize("collective", SIZES)
def test_a_group_of_the_measured_size_has_the_measured_line(collective: str) -> None:
    found = next(link for link in TESTBED_B.links if link.collective == collective)
    assert found.ranks == SIZES[collective]
    cluster = ProfiledCluster.build(TESTBED_B)
    assert line(cluster, collective, found.ranks) == pytest.approx(found.model)


@pytest.mark.parametrize("collective", SIZES)
def test_other_sizes_keep_the_speed_of_the_wire(collective: str) -> None:
    """Every rank sends (P - 1) / P of its bytes (an all-reduce twice that) in P - 1 rounds."""
    cluster, link_of = ProfiledCluster.build(TESTBED_B), SIZES[collective]
    known = line(cluster, collective, link_of)
    for ranks in (2, 16):
        other = line(cluster, collective, ranks)
        assert other.alpha_s == pytest.approx(known.alpha_s * (ranks - 1) / (link_of - 1))
        share, known_share = (ranks - 1) / ranks, (link_of - 1) / link_of
        assert other.beta_s_per_byte == pytest.approx(known.beta_s_per_byte * share / known_share)
    assert line(cluster, collective, 1).seconds(1 << 20) == 0


def test_a_leg_that_was_not_measured_is_slower_beside_computation_too() -> None:
    quiet = ProfiledCluster.build(TESTBED_B)
    crowded = ProfiledCluster.build(replace(TESTBED_B, contended_transfers=1.5))
    quiet_s, crowded_s = (
        cluster.leg("hierarchical_1d", Op.DISPATCH, Span.regular(8, 4)).seconds(1 << 20)
        for cluster in (quiet, crowded)
    )
    assert crowded_s == pytest.approx(1.5 * quiet_s)


@pytest.mark.parametrize("rate_of", ["device", "node"])
@pytest.mark.parametrize("dispatch", ["hierarchical_1d", "hierarchical_2d", "node_once"])
def test_legs_of_other_sizes_keep_the_speed_of_the_links(dispatch: str, rate_of: RateOf) -> None:
    """Measured on two nodes of 4; one that was written by hand is taken as it is."""
    rates = replace(TESTBED_B.rates, link_rate_of=rate_of)
    here, there = Span.regular(2, 4), Span.regular(8, 4)
    for hop in DISPATCHES[dispatch].hops:
        alpha_s, beta = vars(rates.leg(dispatch, hop.op, here)).values()
        line = LinkModel(
            collective=dispatch,
            group="ep",
            lane=hop.lane,
            ranks=8,
            alpha_s=2 * alpha_s,
            beta_s_per_byte=3 * beta,
            op=hop.op,
        )
        by_hand, profiled = (
            ProfiledCluster.build(replace(TESTBED_B, rates=rates, links=(replace(line, nodes=nodes),)))
            for nodes in (None, 2)
        )
        for span in (here, there):
            expected = rates.leg(dispatch, hop.op, span)
            found = profiled.leg(dispatch, hop.op, span)
            assert found.alpha_s == pytest.approx(2 * expected.alpha_s)
            assert found.beta_s_per_byte == pytest.approx(3 * expected.beta_s_per_byte)
            assert by_hand.leg(dispatch, hop.op, span) == line.model


def test_experts_of_several_slices_have_the_fixed_part_of_each() -> None:
    """Two chunks forward and four backward make four slices: a chunk on its way out is two pieces of work."""
    shape = StepShape(moe_layers=(True,), chunks=2, degree_backward=4)
    even = replace(shape, degree_backward=0)
    work = workload(shape)
    seconds = {}
    for alpha_s in (0.0, 1e-3):
        model = TaskModel(op="X", phase="F", alpha_s=alpha_s, scale=1.0)
        cluster = ProfiledCluster.build(replace(TESTBED_B, tasks=(model,), measured=HERE))
        for cut in (shape, even):
            tasks = [t for t in build_graph(cut).tasks if t.op == Op.EXPERTS and t.phase is Phase.FORWARD]
            seconds[cut, alpha_s] = sum(StepCost(cut, work, cluster)(task) for task in tasks)
    assert seconds[shape, 1e-3] - seconds[shape, 0.0] == pytest.approx(4e-3)
    assert seconds[even, 1e-3] - seconds[even, 0.0] == pytest.approx(2e-3)


@pytest.mark.parametrize("group", [8, 4, 16])
def test_what_was_measured_does_not_depend_on_the_rates_of_a_description(group: int) -> None:
    """Wherever its ranks are: that was link_of, too."""
    usual = ProfiledCluster.build(TESTBED_B)
    other = ProfiledCluster.build(
        replace(TESTBED_B, rates=replace(TESTBED_B.rates, intra_bytes_per_s=1e6, link_rate_of="device"))
    )
    for cluster in (usual, other):
        assert cluster.all_to_all(Span.regular(group // 2, 2)) == usual.all_to_all(group)
        assert cluster.all_reduce(Span.regular(group // 2, 2)) == usual.all_reduce(group)


def test_of_several_measured_groups_the_nearest_in_size_counts() -> None:
    """Groups along the very axes first, whatever their size."""
    several = [link_of("all_to_all", "ep", "inter", ranks, 0.01 * ranks) for ranks in (2, 16)]
    fused = link_of("all_to_all", "ep x etp", "inter", 4, 5.0)
    cluster = ProfiledCluster.build(replace(TESTBED_B, links=(*several, fused)))
    for link in several:
        assert cluster.all_to_all(link.ranks) == link.model
    near, far = several
    assert cluster.all_to_all(12).alpha_s == pytest.approx(far.alpha_s * 11 / 15)
    assert cluster.all_to_all(4, Group.EXPERT_SHARDS) == fused.model
    assert cluster.all_to_all(4).alpha_s == pytest.approx(near.alpha_s * 3)


def test_a_link_whose_nodes_are_unknown_prices_its_own_kind_alone() -> None:
    """That of ranks inside a node may be hundreds of times as fast as the network."""
    inside = link_of("all_to_all", "tp", "intra", 2, 0.001)
    cluster = ProfiledCluster.build(replace(TESTBED_B, links=(inside,)))
    without = ProfiledCluster.build(replace(TESTBED_B, links=()))
    apart = Span.regular(2, 1)
    assert cluster.all_to_all(apart) == without.all_to_all(apart)


def test_a_file_lends_another_what_that_lacks() -> None:
    own = link_of("all_to_all", "ep", "inter", 8, 1.0)
    other = link_of("all_to_all", "ep", "inter", 8, 2.0), link_of("all_to_all", "ep", "inter", 4, 3.0)
    tasks = [
        TaskModel(op=op, phase="F", alpha_s=0.1 * n, scale=1.0) for n, op in enumerate(("AT", "TA", "X"))
    ]
    mine = replace(TESTBED_B, links=(own,), tasks=(tasks[0],))
    theirs = replace(TESTBED_B, links=other, tasks=(replace(tasks[0], scale=2.0), tasks[1]))
    joined = mine.beside(theirs)
    assert joined.links == (own, other[1]) and joined.tasks == (tasks[0], tasks[1])
    inside, across = (replace(own, nodes=nodes) for nodes in (1, 2))
    assert replace(mine, links=(inside,)).beside(replace(theirs, links=(across,))).links == (inside, across)
    assert theirs.beside(mine).tasks == theirs.tasks


def test_transfers_of_moves_take_as_long_as_a_run_has_measured() -> None:
    """Only those of their op: rows take the same collective, and are as a profile has link_of them."""
    shape = StepShape(moe_layers=(True,), replica_slots=1)
    file = replace(TESTBED_B, moves=(MoveModel(op=Op.REPLICA_PARAMETERS, in_steps=3.0),))
    before, now = (
        StepCost(shape, workload(shape), ProfiledCluster.build(each)) for each in (TESTBED_B, file)
    )
    for task in build_graph(shape).tasks:
        if task.axes:
            times = 3.0 if task.op == Op.REPLICA_PARAMETERS else 1.0
            assert now.communication_s(task) == pytest.approx(times * before.communication_s(task))
            assert now.scaled_s(task, 2.0) == pytest.approx(times * before.scaled_s(task, 2.0))
