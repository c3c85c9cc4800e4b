"""Links of a cluster file in groups of other sizes than were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cost import AlphaBeta, ProfiledCluster
from penstock.cost.clusters import find_cluster
from penstock.graph import Op

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
