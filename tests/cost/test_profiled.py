"""Links of a cluster file in groups of other sizes than were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cost import AlphaBeta, ProfiledCluster, Span, StepCost
from penstock.cost.cluster import Inside
from penstock.cost.cluster_file import LinkModel, MoveModel, TaskModel
from penstock.cost.clusters import find_cluster
from penstock.features.build import build_graph
from penstock.graph import Phase
from penstock.mesh import Group
from penstock.ops import Op
from penstock.step import StepShape
from tests.cost.test_clusters import HERE
from tests.cost.test_step import workload


def measured(collective: str, group: str, lane: str, ranks: int, alpha_ms: float) -> LinkModel:
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
        measured("all_to_all", "ep", "inter", 8, 0.175),
        measured("all_gather", "node", "intra", 4, 0.032),
        measured("reduce_scatter", "node", "intra", 4, 0.0391),
        measured("all_reduce", "world", "inter", 8, 0.0837),
    ),
)
"""Its rates, and the lines of one rank per node, as they might have been measured."""

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
    cluster, measured = ProfiledCluster.build(TESTBED_B), SIZES[collective]
    known = line(cluster, collective, measured)
    for ranks in (2, 16):
        other = line(cluster, collective, ranks)
        assert other.alpha_s == pytest.approx(known.alpha_s * (ranks - 1) / (measured - 1))
        share, known_share = (ranks - 1) / ranks, (measured - 1) / measured
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
    """Wherever its ranks are: that was measured, too."""
    usual = ProfiledCluster.build(TESTBED_B)
    other = ProfiledCluster.build(
        replace(TESTBED_B, rates=replace(TESTBED_B.rates, intra_bytes_per_s=1e6, link_rate_of="device"))
    )
    for cluster in (usual, other):
        assert cluster.all_to_all(Span.regular(group // 2, 2)) == usual.all_to_all(group)
        assert cluster.all_reduce(Span.regular(group // 2, 2)) == usual.all_reduce(group)


def test_of_several_measured_groups_the_nearest_in_size_counts() -> None:
    """Groups along the very axes first, whatever their size."""
    several = [measured("all_to_all", "ep", "inter", ranks, 0.01 * ranks) for ranks in (2, 16)]
    fused = measured("all_to_all", "ep x etp", "inter", 4, 5.0)
    cluster = ProfiledCluster.build(replace(TESTBED_B, links=(*several, fused)))
    for link in several:
        assert cluster.all_to_all(link.ranks) == link.model
    near, far = several
    assert cluster.all_to_all(12).alpha_s == pytest.approx(far.alpha_s * 11 / 15)
    assert cluster.all_to_all(4, Group.EXPERT_SHARDS) == fused.model
    assert cluster.all_to_all(4).alpha_s == pytest.approx(near.alpha_s * 3)


def test_a_file_lends_another_what_that_lacks() -> None:
    own = measured("all_to_all", "ep", "inter", 8, 1.0)
    other = measured("all_to_all", "ep", "inter", 8, 2.0), measured("all_to_all", "ep", "inter", 4, 3.0)
    tasks = [
        TaskModel(op=op, phase="F", alpha_s=0.1 * n, scale=1.0) for n, op in enumerate(("AT", "TA", "X"))
    ]
    mine = replace(TESTBED_B, links=(own,), tasks=(tasks[0],))
    theirs = replace(TESTBED_B, links=other, tasks=(replace(tasks[0], scale=2.0), tasks[1]))
    joined = mine.beside(theirs)
    assert joined.links == (own, other[1]) and joined.tasks == (tasks[0], tasks[1])
    assert theirs.beside(mine).tasks == theirs.tasks


def test_transfers_of_moves_take_as_long_as_a_run_has_measured() -> None:
    """Only those of their op: rows take the same collective, and are as a profile has measured them."""
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
