"""Five lines, and numbers that add up."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import ClusterConfig, ProfiledCluster, Span
from penstock.cost.cluster_file import LinkModel
from penstock.graph import Lane
from penstock.ops import Op
from penstock.plan import Explanation, Problem, explain, find_plan, reasons
from penstock.plan.effort import Effort
from penstock.plan.predict import predict_s
from penstock.words import change, gib, lane_words, mib, milliseconds
from tests.plan.problems import FILE, problem, problems
from tests.support.draws import draws

SLOW_LINK = ClusterConfig(flops_per_s=1e12, link_bytes_per_s=1e7, link_latency_s=1e-5)
SLOW_DEVICE = ClusterConfig(flops_per_s=1e8, link_bytes_per_s=1e10, link_latency_s=1e-6)


@cache
def told_of(cluster: ClusterConfig) -> Explanation:
    """What is said of the plan that is found with little effort."""
    each = problem(cluster=cluster)
    return explain(each, find_plan(each, effort="low"), 8 << 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "lane", "what"),
    [(SLOW_LINK, "inter", "inter-node bandwidth"), (SLOW_DEVICE, "compute", "faster devices")],
)
def test_what_limits_is_what_helps_when_it_is_faster(cluster: ClusterConfig, lane: str, what: str) -> None:
    told = told_of(cluster)
    assert lane_words(lane, nodes=True) in told.binds
    assert told.busy[lane] == max(told.busy.values()) > 0.8
    assert all(0 < share <= 1 + 1e-9 for share in told.busy.values())
    assert told.faster[what] == min(told.faster.values()) < 0.7
    assert all(0.4 < ratio < 1.001 for ratio in told.faster.values())


HOW = {
    "inter-node bandwidth": {"inter": 2.0},
    "intra-node bandwidth": {"intra": 2.0},
    "faster devices": {"compute": 2.0},
}


@pytest.mark.slow
@draws(3)
@given(problems(), st.sampled_from((0.02, 0.05)), st.sampled_from(get_args(Effort)))
def test_what_if_is_what_planning_again_would_show(each: Problem, budget: float, effort: Effort) -> None:
    """On a changed cluster, with the same budget; either time is the better of both, in their orders."""
    found = find_plan(each, budget=budget, effort=effort)
    told = explain(each, found)
    shown = dict(re.findall(r"2x ([\w -]+?) ([+-][\d.]+ %)", told.lines[4]))
    assert set(shown) == set(told.faster) == set(HOW)
    for what, how in HOW.items():
        changed = replace(each, cluster=each.cluster.faster(**how))
        both = found.best, find_plan(changed, budget=budget, effort=effort).best
        now_s, then_s = (min(predict_s(x, one.choice, one.plan) for one in both) for x in (each, changed))
        assert told.faster[what] == pytest.approx(then_s / now_s)
        assert shown[what] == change(then_s, now_s)


def between(each: Problem) -> float:
    """The bandwidth between nodes."""
    assert isinstance(each.cluster, ClusterConfig)
    return each.cluster.link_bytes_per_s


def test_what_the_clock_has_cut_short_is_not_compared() -> None:
    each = problem((True,))
    late = find_plan(each, budget=0.01, effort="low", ends=lambda: True)
    whole = find_plan(each, budget=0.01, effort="low")
    assert explain(each, late).faster == {} and set(explain(each, late).late) == set(HOW)
    some = explain(each, whole, replan=lambda then: late if between(then) > between(each) else whole)
    assert set(some.faster) == {"intra-node bandwidth", "faster devices"}
    assert some.to_dict()["faster_not_planned"] == [*some.late] == ["inter-node bandwidth"]
    assert "2x inter-node bandwidth" in some.lines[4] and "2x inter-node bandwidth -" not in some.lines[4]
    assert reasons(each, whole).faster == {} and len(reasons(each, whole).lines) == 5


@pytest.mark.slow
def test_five_lines() -> None:
    each = problem()
    found = find_plan(each, budget=0.05)
    told = explain(each, found, 8 << 30)
    plan, time, limit, following, last = told.lines
    assert found.best.choice.schedule in plan
    assert milliseconds(found.best.predicted_s) in time and "for any order of these tasks" in time
    assert "limits the step" in limit and "; busy share of the step: computation" in limit
    assert found.others[0].choice.schedule in following and "+" in following
    assert "2x inter-node bandwidth -" in last and "of 8.00 GiB per rank" in limit
    assert all("\n" not in line for line in told.lines)
    data = json.loads(json.dumps(told.to_dict()))
    assert data["lines"] == list(told.lines) and data["predicted_s"] == found.best.predicted_s


def link(collective: str, lane: Lane, beta: float, op: str = "") -> LinkModel:
    group, ranks = ("node", 2) if lane is Lane.INTRA else ("ep", 4)
    return LinkModel(
        collective=collective,
        group=group,
        lane=str(lane),
        ranks=ranks,
        alpha_s=0.0,
        beta_s_per_byte=beta,
        op=op,
    )


def test_only_one_thing_is_faster() -> None:
    links = (
        link("all_to_all", Lane.INTER, 1e-8),
        link("all_reduce", Lane.INTER, 2e-8),
        link("hierarchical_2d", Lane.INTER, 1e-8, Op.DISPATCH),
        link("hierarchical_2d", Lane.INTRA, 1e-9, Op.DISPATCH_GATHER),
    )
    measured = ProfiledCluster.build(replace(FILE, rates=SLOW_LINK, links=links, tasks=()))

    def betas(cluster: ClusterConfig) -> tuple[float, ...]:
        span = Span.regular(2, 2)
        found = [cluster.all_to_all(span), cluster.all_reduce(span)]
        found += [cluster.leg("hierarchical_2d", op, span) for op in (Op.DISPATCH, Op.DISPATCH_GATHER)]
        return tuple(each.beta_s_per_byte for each in found)

    assert betas(measured) == (1e-8, 2e-8, 1e-8, 1e-9)
    assert betas(measured.faster(inter=2)) == (5e-9, 1e-8, 5e-9, 1e-9)
    assert betas(measured.faster(intra=2)) == (1e-8, 2e-8, 1e-8, 5e-10)
    assert measured.faster(compute=2).flops_per_s == 2 * measured.flops_per_s
    group = replace(link("all_to_all", Lane.INTER, 1e-8), nodes=1)
    inside = ProfiledCluster.build(replace(FILE, links=(group,)))
    found = [inside.faster(**{rate: 2}).all_to_all(Span.regular(1, 4)) for rate in ("inter", "intra")]
    assert [each.beta_s_per_byte for each in found] == [1e-8, 5e-9]
    file = ProfiledCluster.build(FILE).faster(intra=2)
    assert isinstance(file, ProfiledCluster)
    assert file.intra_bytes_per_s == 2 * FILE.rates.intra_bytes_per_s
    assert file.link_bytes_per_s == FILE.rates.link_bytes_per_s
    assert replace(file, file=FILE, intra_bytes_per_s=FILE.rates.intra_bytes_per_s) == ProfiledCluster.build(
        FILE
    )


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (milliseconds(2.2917), "2,292 ms"),
        (milliseconds(0.10477), "104.8 ms"),
        (milliseconds(0.00123), "1.230 ms"),
        (change(0.69, 1.0), "-31 %"),
        (change(1.004, 1.0), "+0.4 %"),
        (mib(3 << 19), "1.5 MiB"),
        (mib(1 << 17), "128 KiB"),
        (gib(1 << 28), "256 MiB"),
        (gib(600 << 10), "1 MiB"),
        (gib(107), "107 bytes"),
        (gib(1), "1 byte"),
        (gib(3000), "3 KiB"),
        (gib(0), "0 MiB"),
        (mib(107), "107 bytes"),
        (gib(11 << 30), "11.0 GiB"),
    ],
)
def test_numbers_for_people(shown: str, text: str) -> None:
    assert shown == text


LATE = ClusterConfig(flops_per_s=1e12, link_bytes_per_s=1e11, link_latency_s=5e-3)


@pytest.mark.few(2)
@pytest.mark.slow
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
    told = told_of(cluster)
    assert told.binds.startswith("latency limits the step: ") is late
    assert (told.faster["inter-node bandwidth"] > 0.97) is (late or cluster is SLOW_DEVICE)


@pytest.mark.few(1)
@pytest.mark.parametrize("slow", ["inter", "intra"])
@pytest.mark.slow
def test_a_network_between_nodes_that_waits_for_links_inside_says_so(slow: str) -> None:
    rates = ClusterConfig(flops_per_s=1e12, link_bytes_per_s=1e9, intra_bytes_per_s=1e9)
    each = problem(cluster=rates.faster(**{slow: 0.01}))
    limit = explain(each, find_plan(each, budget=0.01)).lines[2]
    assert ", network between nodes" in limit
    assert ("network between nodes (mostly limited by links inside nodes)" in limit) == (slow == "intra")


SLOW_INSIDE = ClusterConfig(flops_per_s=1e12, intra_bytes_per_s=1e7, intra_latency_s=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("two_nodes_in_the_file", [False, True])
def test_on_one_node_all_links_are_those_between_ranks(two_nodes_in_the_file: bool) -> None:
    measured = ProfiledCluster.build(replace(FILE, rates=SLOW_INSIDE))
    each = problem(cluster=measured if two_nodes_in_the_file else SLOW_INSIDE)
    each = replace(each, workload=replace(each.workload, node_size=4, devices_per_node=4))
    told = explain(each, find_plan(each, effort="low"))
    assert told.busy["inter"] > 0.9 and set(told.faster) == {"bandwidth between ranks", "faster devices"}
    assert told.faster["bandwidth between ranks"] < 0.6


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "helps"),
    [
        (replace(SLOW_INSIDE, link_bytes_per_s=1e9), "intra-node"),
        (
            replace(SLOW_INSIDE, link_bytes_per_s=1e7, link_latency_s=1e-6, intra_bytes_per_s=1e9),
            "inter-node",
        ),
    ],
)
def test_inside_nodes_links_may_limit_collectives_that_leave_them(cluster: ClusterConfig, helps: str) -> None:
    told = told_of(cluster)
    assert told.faster[f"{helps} bandwidth"] < 0.6
    others = [ratio for what, ratio in told.faster.items() if what != f"{helps} bandwidth"]
    assert "bandwidth between ranks" not in told.faster and min(others) > 0.9
