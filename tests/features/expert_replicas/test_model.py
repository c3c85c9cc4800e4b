"""The time of a layer: links and ranks by hand, Pro-Prophet's equations, and its schedule simulated task by
task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest

from penstock.cost import ClusterConfig, StepCost
from penstock.cost.cluster import RateOf
from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.features.expert_replicas.prices import expert_costs
from penstock.features.expert_replicas.problem import ExpertCosts, LayerLoad, paper_seconds, seconds_of
from penstock.features.routed import links_of
from penstock.mesh import Group
from penstock.ops import Op
from penstock.routing.links import Links
from tests.plan.problems import problem, with_sharing

APART = Links(nodes=(0, 1), across_s_per_byte=1.0, inside_s_per_byte=1.0)
"""Two nodes of one rank; a byte takes a second."""


def test_the_busiest_link_counts() -> None:
    """Nodes of two ranks: rank 0 sends 3 and 5 bytes to the other node, 4 to its neighbour, which sends 2
    away."""
    links = Links(nodes=(0, 0, 1, 1), across_s_per_byte=2.0, inside_s_per_byte=1.0)
    sent = np.array([[9, 4, 3, 5], [0, 9, 2, 0], [0, 0, 9, 0], [0, 0, 0, 9]])
    assert links.seconds(sent) == 2 * (3 + 5 + 2)
    assert replace(links, card_per_rank=True).seconds(sent) == 2 * (3 + 5)
    assert replace(links, across_s_per_byte=0.1).seconds(sent) == 4
    assert links.mean_s_per_byte == pytest.approx(2 * 4 / 3)


@pytest.mark.parametrize(("tp_size", "etp_size"), [(1, 1), (1, 4), (4, 1), (4, 2)])
def test_rows_and_the_rest_of_a_block_cost_what_tasks_do(tp_size: int, etp_size: int) -> None:
    each = with_sharing(problem(), tp_size, etp_size)
    costs, shape = expert_costs(each.workload, each.cluster), each.plan(Decision()).shape
    step = StepCost(shape, each.workload, each.cluster)
    block = [task for task in build_graph(shape).tasks if task.layer == 0 and task.forward]
    (experts,) = (task for task in block if task.op == Op.EXPERTS)
    rows = step.rows(experts) * experts.cut.row_copies
    flops, rate = {task: step.work(task).flops for task in block}, each.cluster.flops_per_s
    assert costs.row_s * rate == pytest.approx(flops[experts] / rows)
    rest_s = costs.other_s - each.cluster.task_overhead_s
    assert rest_s * rate == pytest.approx(sum(flops.values()) - flops[experts])


@pytest.mark.parametrize("rate_of", get_args(RateOf))
@pytest.mark.parametrize("etp_size", [1, 2, 4])
def test_links_carry_what_all_ranks_send_that_share_experts(etp_size: int, rate_of: RateOf) -> None:
    """Each of them an equal part of the rows, and its shard of every copy."""
    each = with_sharing(problem(cluster=ClusterConfig(link_rate_of=rate_of)), 1, etp_size)
    work, rng = each.workload, np.random.default_rng(0)
    rows, copies = (rng.integers(0, most, (work.ep_size, work.ep_size)) for most in (99, 3))
    rows_PP, copies_PP = np.zeros((2, work.world_size, work.world_size))
    for ranks in work.mesh.groups(Group.EXPERT):
        rows_PP[np.ix_(ranks, ranks)], copies_PP[np.ix_(ranks, ranks)] = rows / etp_size, copies
    costs = replace(expert_costs(work, each.cluster), forward_slack_s=0.0, backward_slack_s=0.0)
    found = seconds_of(costs, LayerLoad(traffic=rows.astype(np.float64), copies=copies))
    links = links_of(work, each.cluster, range(work.world_size))
    assert found.rows_s == pytest.approx(4 * work.wire_bytes(1) * links.seconds(rows_PP))
    assert found.weights_s == pytest.approx(2 * work.expert_bytes * links.seconds(copies_PP))


def test_equation_8() -> None:
    """16 ranks, an expert copied to all but n: Eq 4 is (16 - n) / 16 of an expert's bytes, hidden by Eq 8 if
    short."""
    links = Links(nodes=tuple(range(16)), across_s_per_byte=1.0, inside_s_per_byte=1.0)
    costs = ExpertCosts(
        links=links, row_s=1.0, row_bytes=1.0, parameter_bytes=80.0, gradient_bytes=80.0, other_s=5.0
    )
    received, computed = np.full(16, 10.0), np.array([20.0, *[12.0] * 15])
    rows_s, experts_s = 4 * 10, 3 * 20
    for n, share in ((0, 1.0), (4, 0.75), (8, 0.5), (12, 0.25), (14, 0.125)):
        copied_s = 80 * share
        left_s = max(0.0, copied_s - 20 - 5) + max(0.0, copied_s - 2 * 20 - 2 * 5)
        assert paper_seconds(costs, received, computed, 1, n) == pytest.approx(rows_s + experts_s + left_s)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Seconds of one all-to-all, of experts and of the rest forward, of Trans and of Agg."""

    rows_s: float
    experts_s: float
    other_s: float
    trans_s: float
    agg_s: float


class Resources:
    """A device and a link, each serving its tasks in order."""

    def __init__(self) -> None:
        self.free_s = {"device": 0.0, "link": 0.0}

    def run(self, name: str, seconds: float, *after_s: float) -> float:
        """When it ends."""
        self.free_s[name] = max(self.free_s[name], *after_s, 0.0) + seconds
        return self.free_s[name]


def simulated_s(blocks: list[Block]) -> float:
    """Pro-Prophet's schedule (Algorithm 2): weights of a block travel under experts and the rest of the one
    before."""
    on = Resources()
    there_s, ready_s = on.run("link", blocks[0].trans_s), 0.0
    for block, trans_s in zip(blocks, [*(b.trans_s for b in blocks[1:]), 0.0], strict=True):
        second_s = min(trans_s, block.other_s)
        dispatched_s = on.run("link", block.rows_s, ready_s)
        computed_s = on.run("device", block.experts_s, dispatched_s, there_s)
        on.run("link", trans_s - second_s, dispatched_s)
        ready_s = on.run("device", block.other_s, on.run("link", block.rows_s, computed_s))
        there_s = on.run("link", second_s)
    for block, agg_s in zip(blocks[::-1], [0.0, *(b.agg_s for b in blocks[:0:-1])], strict=True):
        second_s = min(agg_s, 2 * block.other_s)
        ready_s = on.run("device", 2 * block.other_s, ready_s)
        on.run("link", second_s, ready_s - 2 * block.other_s)
        combined_s = on.run("link", block.rows_s, ready_s)
        computed_s = on.run("device", 2 * block.experts_s, combined_s)
        on.run("link", agg_s - second_s, combined_s)
        ready_s = on.run("link", block.rows_s, computed_s)
    return on.run("link", blocks[0].agg_s, ready_s)


def priced_s(block: Block, before: Block | None) -> float:
    """By the layer's model, with the block before as slack."""
    hidden_s = before.experts_s + before.other_s if before else 0.0
    costs = ExpertCosts(
        links=APART,
        row_s=block.experts_s,
        row_bytes=block.rows_s,
        parameter_bytes=block.trans_s,
        gradient_bytes=block.agg_s,
        forward_slack_s=hidden_s,
        backward_slack_s=2 * hidden_s,
    )
    load = LayerLoad(traffic=np.array([[0.0, 1.0], [1.0, 0.0]]), copies=np.array([[0, 1], [0, 0]]))
    return seconds_of(costs, load).total_s + 3 * block.other_s


def test_with_the_block_before_as_slack_the_sum_of_layers_is_exact() -> None:
    """SYSTEMS 6.8: simulated task by task, however long Trans and Agg are."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        drawn = rng.uniform(0.1, 3.0, (int(rng.integers(1, 9)), 5)).tolist()
        names = ("rows_s", "experts_s", "other_s", "trans_s", "agg_s")
        blocks = [Block(**dict(zip(names, numbers, strict=True))) for numbers in drawn]
        priced = [priced_s(block, before) for block, before in zip(blocks, [None, *blocks[:-1]], strict=True)]
        assert sum(priced) == pytest.approx(simulated_s(blocks))


def test_rows_of_a_rank_s_own_are_computed_there_and_not_received() -> None:
    load = LayerLoad(traffic=np.array([[3.0, 1.0], [2.0, 5.0]]), copies=np.zeros((2, 2), np.int64))
    assert load.computed.tolist() == [5.0, 6.0]
    assert load.received.tolist() == [2.0, 1.0]
