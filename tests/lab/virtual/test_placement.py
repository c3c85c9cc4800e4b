"""Steps of virtual devices whose samples and experts move: sizes that fit between ranks, and real runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from penstock.cost import ClusterConfig, RoutedCost, StepCost, routing_sizes
from penstock.decision import PlacementConfig
from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.prices import ROUTED as REPLICAS
from penstock.features.sample_placement.feature import SampleMoves
from penstock.features.sample_placement.prices import ROUTED as SAMPLES
from penstock.graph import Lane
from penstock.lab.virtual import VirtualConfig, build_virtual
from penstock.lab.virtual.stack import Movement
from penstock.mesh import Group
from penstock.ops import Op
from penstock.plan.problem import replica_slack
from penstock.schedule import StepPlan
from penstock.schedule.schedule import freeze, unit_cost
from penstock.topology import Layout
from penstock.train.assemble import base_shape, first_plan, gradient_bytes, workload
from penstock.workloads import routing_of
from tests.support.layouts import tiny_case
from tests.support.parity import Case, machinery_of
from tests.support.ranks import Pools

LOCAL = VirtualConfig(routing="dirichlet", dirichlet_concentration=0.1)
SLEEPS = ClusterConfig(task_overhead_s=5e-4, flops_per_s=1e8)
BOTH = PlacementConfig(samples="netmoe", experts="planned", replica_slots=2)

PLACEMENT_MOVES = [op for op, each in {**REPLICAS, **SAMPLES}.items() if each.move]
"""Ops that move what follows samples and experts, and by which ranks tell each other of them."""


def case_of(*, ep_size: int = 4) -> Case:
    return tiny_case(
        4,
        chunks=1,
        all_reduce_chunk_bytes=1024,
        num_layers=3,
        hidden_size=16,
        seq_len=6,
        vocab_size=13,
        moe_layers=(0, 2),
        num_experts=8,
        top_k=2,
        ep_size=ep_size,
        batch=4,
    )


def planned(case: Case, placement: PlacementConfig, number: int) -> tuple[StepPlan, RoutedCost]:
    """The plan of a case and the cost of one of its steps."""
    config = replace(case.config, placement=placement)
    layout = Layout.build(config.parallel, 4, 0, config.moe.num_experts)
    sizes = gradient_bytes(config.model, config.moe, layout)
    work = workload(config, layout, sizes)
    plan = first_plan(config, layout, base_shape(config, layout), sizes)
    routing = routing_of(LOCAL, routing_sizes(work, sum(plan.shape.moe_layers)))
    movement = Movement(plan.shape, work, routing, placement, SLEEPS)
    placed = movement.placed(number)
    return plan, RoutedCost(plan.shape, work, SLEEPS, routing.counts(number), placed=placed)


def test_what_ranks_send_where_rows_are_split_by_their_own_loads() -> None:
    plan, cost = planned(case_of(), replace(BOTH, samples="none"), 3)
    assert cost.placed is not None and any(replication.limit for replication in cost.placed.replications)
    check_moves(plan, cost)


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [4, 2])
@pytest.mark.parametrize("number", [0, 3])
def test_ranks_expect_what_others_send(ep_size: int, number: int) -> None:
    seen, moved = check_moves(*planned(case_of(ep_size=ep_size), BOTH, number))
    assert set(PLACEMENT_MOVES) <= seen
    assert moved > 0, "samples with preferences move"


def check_moves(plan: StepPlan, cost: RoutedCost) -> tuple[set[str], int]:
    """Every rank expects what the others send. Returns the ops, and how many samples move."""
    seen, moved = set(), 0
    for task in plan.graph.tasks:
        if task.op not in (*PLACEMENT_MOVES, Op.DISPATCH, Op.COMBINE):
            continue
        seen.add(task.op)
        for group in cost.workload.mesh.groups(task.axes):
            moves = {rank: cost.moves.move(task, rank) for rank in group}
            for (i, a), (j, b) in product(enumerate(group), repeat=2):
                sent = moves[a].input_splits[0 if moves[a].collective == "all_gather" else j]
                assert sent == moves[b].output_splits[i], (task, a, b)
                moved += sent if task.op == Op.SAMPLE_MOVE and a != b else 0
    return seen, moved


@pytest.mark.slow
def test_replicas_take_the_bytes_of_an_expert_and_leave_owners_alone() -> None:
    plan, cost = planned(case_of(), BOTH, 3)
    assert cost.placed is not None
    for task in plan.graph.tasks:
        if task.op != Op.REPLICA_PARAMETERS:
            continue
        replication = cost.placed.replications[sum(plan.shape.moe_layers[: task.layer])]
        for rank in range(4):
            move = cost.moves.move(task, rank)
            here = sum(expert >= 0 for expert in replication.replicas[rank])
            assert sum(move.output_splits) == here
            assert move.output_splits[cost.workload.mesh.place(rank, Group.EXPERT)] == 0
    pieces = [t for t in plan.graph.tasks if t.op == Op.REPLICA_PARAMETERS and t.layer == 0]
    moves = [cost.moves.move(task, 0).row_bytes for task in pieces]
    assert sum(moves) == cost.workload.expert_bytes


@pytest.mark.slow
def test_the_first_step_has_no_replicas_and_samples_keep_their_number() -> None:
    _, cost = planned(case_of(), BOTH, 0)
    assert cost.placed is not None and all(replication.is_empty for replication in cost.placed.replications)
    everyone = np.sort(cost.placed.held_YDB.reshape(len(cost.placed.held_YDB), -1), axis=1)
    assert (everyone == everyone[0]).all()


def run_moving(rank: int, case: Case, placement: PlacementConfig) -> list[tuple[bool, float]]:
    """Whether lanes kept their order in steps 0 to 2, and what the host slept."""
    config = replace(case.config, cluster=SLEEPS, placement=placement)
    stack = build_virtual(config, LOCAL, machinery_of(rank, case))
    found = []
    for number in range(3):
        stack.step(number)
        records = sorted(stack.records(), key=lambda record: record.start_s)
        kept = all(
            [r.task for r in records if r.lane is lane] == list(order)
            for lane, order in stack.plan.schedule.lanes.items()
        )
        found.append((kept, sum(r.duration_s for r in records if r.lane is Lane.HOST)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("ep_size", "samples"), [(4, "netmoe"), (2, "netmoe"), (2, "none")])
def test_steps_run_on_real_ranks(ranks: Pools, ep_size: int, samples: SampleMoves) -> None:
    """Where samples stay, counts of all ranks are gathered in the place of those that concern each."""
    case = case_of(ep_size=ep_size)
    for steps in ranks(4).run(run_moving, case, replace(BOTH, samples=samples)):
        assert all(kept for kept, _ in steps)
        assert all(host_s > 0 for _, host_s in steps)


def test_replicas_are_planned_with_the_slack_of_the_order_in_use() -> None:
    """Of two orders of the same tasks each leaves other gaps."""
    case = replace(case_of(ep_size=1), world_size=1)
    config = replace(case.config, cluster=SLEEPS, placement=PlacementConfig(experts="planned"))
    stack = build_virtual(config, LOCAL, machinery_of(0, case))
    flowmoe, first = stack.plan, stack.movement
    deep = freeze("deep", flowmoe.graph, unit_cost, lambda task: (task.microbatch or 0,))
    stack.adopt(replace(flowmoe, schedule=deep))
    second = stack.movement
    assert first.slack != second.slack
    for plan, movement in ((stack.plan, second), (flowmoe, first)):
        stack.use(plan, stack.placement)
        even = StepCost(plan.shape, stack.workload, SLEEPS)
        assert stack.movement is movement
        assert movement.slack == replica_slack(plan, even, stack.machinery.layout.mesh)


def test_replicas_are_planned_by_the_links_that_were_measured_and_the_dispatch_in_use() -> None:
    """A stack adopts plans before its links are measured, and is made for one dispatch among several."""
    case = replace(case_of(ep_size=1), world_size=1)
    config = replace(case.config, cluster=SLEEPS, placement=PlacementConfig(experts="planned"))
    stack = build_virtual(config, LOCAL, machinery_of(0, case))
    assumed = stack.movement
    stack.links = replace(SLEEPS, task_overhead_s=2 * SLEEPS.task_overhead_s)
    even = StepCost(stack.plan.shape, stack.workload, stack.links)
    found = stack.movement
    assert found.cluster == stack.links and found.slack != assumed.slack
    assert found.slack == replica_slack(stack.plan, even, stack.machinery.layout.mesh)
    hops = DISPATCHES["hierarchical_2d"].hops
    stack.use(replace(stack.plan, shape=replace(stack.plan.shape, dispatch=hops)), stack.placement)
    assert stack.movement.workload.dispatch == "hierarchical_2d"


def test_replicas_are_planned_as_seldom_as_is_asked_for() -> None:
    """With `every` = 3 steps 1 to 3 have the replicas that step 0 asked for, as far as they pay."""
    seldom = PlacementConfig(experts="least_loaded", replica_slots=1, every=3)
    hosted = []
    for number in range(1, 5):
        _, cost = planned(case_of(), seldom, number)
        assert cost.placed is not None
        hosted.append([h.replicas for h in cost.placed.replications if not h.is_empty])
    assert hosted[0] and all(replicas in hosted[0] for later in hosted[1:3] for replicas in later)
