"""Links of a cluster file in groups of other sizes than were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cost import AlphaBeta, ProfiledCluster, StepCost
from penstock.cost.cluster_file import TaskModel
from penstock.cost.clusters import find_cluster
from penstock.graph import Phase
from penstock.ops import Op
from penstock.step import StepShape, build_graph
from tests.cost.test_clusters import HERE
from tests.cost.test_step import workload

TESTBED_B = find_cluster("fsmoe-testbed-b")
SIZES = {"all_to_all": 8, "all_reduce": 8, "all_gather": 4, "reduce_scatter": 4}


def line(cluster: ProfiledCluster, collective: str, ranks: int) -> AlphaBeta:
    if collective in ("all_gather", "reduce_scatter"):
        return cluster.shards(ranks, scatters=collective == "reduce_scatter")
    return cluster.all_to_all(ranks) if collective == "all_to_all" else cluster.all_reduce(ranks)


@pytest.mark.parametrize("collective", SIZES)
def test_a_group_of_the_measured_size_has_the_measured_line(collective: str) -> None:
    found = next(link for link in TESTBED_B.links if link.collective == collective)
    assert found.ranks == SIZES[collective]
    assert line(ProfiledCluster.build(TESTBED_B), collective, found.ranks) == pytest.approx(found.model)


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
    crowded = ProfiledCluster.build(replace(TESTBED_B, transfers_beside_compute=1.5))
    quiet_s, crowded_s = (
        cluster.leg("hierarchical_1d", Op.DISPATCH, 8, 4).seconds(1 << 20) for cluster in (quiet, crowded)
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
