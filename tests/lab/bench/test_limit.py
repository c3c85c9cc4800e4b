"""The limit that a comparison shows, from the bytes of tasks: no simulated step is quicker, in any form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import ClusterConfig, StepCost
from penstock.decision import Decision
from penstock.graph import Lane, Task
from penstock.lab.bench.compare import busiest_device_bytes, busiest_uplink_bytes
from penstock.mesh import node_of
from penstock.plan import Problem
from penstock.plan.space import space
from penstock.schedule import StepPlan
from penstock.step.shape import ExpertForm
from tests.plan.problems import Shared, problems, shared
from tests.support.draws import draws

Traffic = list[Counter[int]]
"""By rank what it sends, by receiving rank."""


def sent(task: Task, cost: StepCost, nodes_of: list[int]) -> Iterator[tuple[int, int, float]]:
    """From whom to whom how many bytes. A sum is scattered and gathered inside nodes, and goes round between
    them; nobody does it with less."""
    work, size = cost.work(task), cost.work(task).sent_bytes
    for group in cost.workload.mesh.groups(task.axes):
        nodes = sorted({nodes_of[rank] for rank in group})
        for rank in group:
            here = [peer for peer in group if nodes_of[peer] == nodes_of[rank]]
            if work.collective != "all_reduce":
                yield from ((rank, peer, size / len(group)) for peer in group if peer != rank)
                continue
            yield from ((rank, peer, 2 * size / len(here)) for peer in here if peer != rank)
            there = [peer for peer in group if nodes_of[peer] == nodes[nodes.index(nodes_of[rank]) - 1]]
            if len(nodes) > 1:
                share = 2 * (len(nodes) - 1) / len(nodes) * size / len(here)
                yield rank, there[here.index(rank)], share


def traffic(plan: StepPlan, cost: StepCost, lanes: tuple[Lane, ...], per_node: int) -> Traffic:
    world = cost.workload.world_size
    nodes_of, found = (
        [node_of(rank, per_node) for rank in range(world)],
        [Counter[int]() for _ in range(world)],
    )
    for task in plan.graph.tasks:
        if task.lane in lanes and cost.work(task).collective:
            for rank, peer, size in sent(task, cost, nodes_of):
                found[rank][peer] += size  # type: ignore[assignment]  # fractions of bytes: routing is even
    return found


def check(each: Problem, choice: Decision) -> None:
    plan = each.plan(choice)
    cost, cluster, work = each.cost(choice, plan.shape), each.cluster, each.workload
    assert isinstance(cost, StepCost)
    seconds = each.simulate(choice, plan).iteration_s * (1 + 1e-9)
    per_node = work.devices_per_node
    nodes = work.world_size // per_node
    assert seconds >= sum(cost(task) for task in plan.graph.tasks if task.lane.computes)
    both = traffic(plan, cost, (Lane.INTER, Lane.INTRA), per_node)
    assert seconds >= busiest_uplink_bytes(both, nodes, per_node) / cluster.link_bytes_per_s
    inside = busiest_device_bytes(traffic(plan, cost, (Lane.INTRA,), per_node))
    assert seconds >= inside / cluster.intra_bytes_per_s


@pytest.mark.few(2)
@pytest.mark.slow
@draws(40)
@given(problems(), shared(), st.floats(0, 2), st.randoms(use_true_random=False))
@pytest.mark.parametrize("form", ["gather", "s1", "s2", "baseline"])
def test_no_step_is_quicker_than_its_bytes_and_its_computation(
    form: ExpertForm, each: Problem, sharing: Shared, faster: float, rng: Any
) -> None:
    """The nodes' cards are shared by their devices, whose own links are up to a hundred times as fast."""
    each = sharing(each)
    rates = each.cluster
    assert isinstance(rates, ClusterConfig)
    intra = rates.link_bytes_per_s * 10**faster
    each = replace(each, cluster=replace(rates, link_rate_of="node", intra_bytes_per_s=intra))
    choices = [choice for choice in space(each) if choice.form == form]
    for choice in rng.sample(choices, min(2, len(choices))):
        check(each, choice)
