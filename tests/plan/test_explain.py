"""Five lines, and numbers that add up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.cost import AlphaBeta, ClusterConfig, FittedCluster, ProfiledCluster
from penstock.ops import Op
from penstock.plan import MemoryBudget, explain, find_plan
from penstock.plan.explain import faster
from penstock.words import change, gib, mib, milliseconds
from tests.plan.problems import FILE, problem

SLOW_LINK = ClusterConfig(flops_per_s=1e12, link_bytes_per_s=1e7, link_latency_s=1e-5)
SLOW_DEVICE = ClusterConfig(flops_per_s=1e8, link_bytes_per_s=1e10, link_latency_s=1e-6)


@pytest.mark.parametrize(
    ("cluster", "lane", "what"),
    [(SLOW_LINK, "inter", "inter-node bandwidth"), (SLOW_DEVICE, "compute", "faster devices")],
)
def test_what_binds_is_what_helps_when_it_is_faster(cluster: ClusterConfig, lane: str, what: str) -> None:
    each = problem(cluster=cluster)
    found = find_plan(each)
    told = explain(each, found, MemoryBudget(bytes=8 << 30))
    assert f"lane {lane} " in told.binds
    assert told.busy[lane] == max(told.busy.values()) > 0.8
    assert all(0 < share <= 1 + 1e-9 for share in told.busy.values())
    assert told.faster[what] == min(told.faster.values()) < 0.7
    assert all(0.4 < ratio < 1.001 for ratio in told.faster.values())


def test_five_lines() -> None:
    each = problem()
    found = find_plan(each)
    told = explain(each, found, MemoryBudget(bytes=8 << 30))
    plan, time, binding, following, last = told.lines
    assert found.best.choice.schedule in plan
    assert milliseconds(found.best.predicted_s) in time and "no order of these tasks" in time
    assert "binds" in binding and "; busy: compute" in binding
    assert found.others[0].choice.schedule in following and "+" in following
    assert "with 2x inter-node bandwidth: -" in last and "of 8.00 GiB per rank" in last
    assert all("\n" not in line for line in told.lines)
    data = json.loads(json.dumps(told.to_dict()))
    assert data["lines"] == list(told.lines) and data["predicted_s"] == found.best.predicted_s


def test_only_one_thing_is_faster() -> None:
    fitted = FittedCluster.build(
        SLOW_LINK,
        dispatch=AlphaBeta(alpha_s=1e-4, beta_s_per_byte=1e-8),
        reduce=AlphaBeta(alpha_s=1e-4, beta_s_per_byte=2e-8),
        legs={
            ("hierarchical_2d", Op.DISPATCH): AlphaBeta(alpha_s=0.0, beta_s_per_byte=1e-8),
            ("hierarchical_2d", Op.DISPATCH_GATHER): AlphaBeta(alpha_s=0.0, beta_s_per_byte=1e-9),
        },
    )
    between, inside = faster(fitted, inter=2), faster(fitted, intra=2)
    assert isinstance(between, FittedCluster) and isinstance(inside, FittedCluster)
    assert between.dispatch.beta_s_per_byte == 5e-9 and between.reduce.beta_s_per_byte == 1e-8
    assert between.legs["hierarchical_2d", Op.DISPATCH].beta_s_per_byte == 5e-9
    assert between.legs["hierarchical_2d", Op.DISPATCH_GATHER].beta_s_per_byte == 1e-9
    assert inside.dispatch == fitted.dispatch
    assert inside.legs["hierarchical_2d", Op.DISPATCH_GATHER].beta_s_per_byte == 5e-10
    assert faster(fitted, compute=2).flops_per_s == 2e12
    file = faster(ProfiledCluster.build(FILE), intra=2)
    assert isinstance(file, ProfiledCluster)
    assert file.intra_bytes_per_s == 2 * FILE.rates.intra_bytes_per_s
    assert file.link_bytes_per_s == FILE.rates.link_bytes_per_s
    assert replace(file, file=FILE, intra_bytes_per_s=FILE.rates.intra_bytes_per_s) == ProfiledCluster.build(
        FILE
    )


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (milliseconds(2.2917), "2292 ms"),
        (milliseconds(0.10477), "104.8 ms"),
        (milliseconds(0.00123), "1.230 ms"),
        (change(0.69, 1.0), "-31 %"),
        (change(1.004, 1.0), "+0.4 %"),
        (mib(3 << 19), "1.5 MiB"),
        (mib(1 << 17), "128 KiB"),
        (gib(1 << 28), "256 MiB"),
        (gib(11 << 30), "11.0 GiB"),
    ],
)
def test_numbers_for_people(shown: str, text: str) -> None:
    assert shown == text


LATE = ClusterConfig(flops_per_s=1e12, link_bytes_per_s=1e11, link_latency_s=5e-3)


@pytest.mark.parametrize(
    ("cluster", "late"),
    [
        (LATE, True),
        (SLOW_LINK, False),
        (replace(LATE, link_bytes_per_s=1e7), False),  # 5 ms of latency, and bytes take far longer
        (SLOW_DEVICE, False),
    ],
)
def test_latency_is_named_where_start_ups_take_most_of_the_communication(
    cluster: ClusterConfig, late: bool
) -> None:
    each = problem(cluster=cluster)
    told = explain(each, find_plan(each, effort="low"))
    assert told.binds.startswith("latency binds: ") is late
    assert (told.faster["inter-node bandwidth"] > 0.97) is (late or cluster is SLOW_DEVICE)
