"""Costs per rank: the even ones where routing is even, in proportion to the rows where it is not."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import ProfiledCluster, RoutedCost, StepCost, Workload
from penstock.cost.cluster_file import ClusterFile, TaskModel
from penstock.cost.span import even_leg
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Lane, Phase, Task
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.core import COMBINE_OF, TRANSFERS
from penstock.placement import ExpertPlacement
from penstock.routing.rows import by_source_and_target
from penstock.routing.sizes import split_sizes
from penstock.schedule import SCHEDULES
from penstock.step import Sharing, StepShape
from penstock.step.shape import ExpertForm, TokenLayout
from penstock.timing import lower_bound, simulate
from penstock.workloads import Routing
from tests.steps import planned, task_at
from tests.support.draws import draws
from tests.workloads.strategies import CLUSTER, steps

Step = tuple[StepShape, Workload, Routing]


def cost_of(step: Step) -> RoutedCost:
    shape, work, routing = step
    return RoutedCost(shape, work, CLUSTER, routing.counts(0))


def moves(shape: StepShape) -> list[Task]:
    return [task for task in build_graph(shape).tasks if task.op in (Op.DISPATCH, Op.COMBINE)]


def renamed(task: Task, **changes: Any) -> Task:
    """The same piece of the step under another name."""
    return replace(task, name=task.name._replace(**changes))


def splits_of(cost: RoutedCost, task: Task, rank: int) -> tuple[list[int], list[int]]:
    """Rows to and from every rank of the expert group in a flat transfer."""
    move = cost.moves.move(task, rank)
    assert move.group == Group.EXPERT
    return list(move.input_splits), list(move.output_splits)


def moe_layer(cost: RoutedCost, task: Task) -> int:
    """The task's layer counted among MoE layers."""
    return sum(cost.shape.moe_layers[: task.layer])


# ---- rows --------------------------------------------------------------------------------------------------


@given(steps(capacity=False))
def test_a_slice_has_the_rows_of_its_tokens(step: Step) -> None:
    """As a real stack cuts: tokens of a microbatch into nearly equal ranges; no token twice at an expert."""
    (shape, work, _), cost = step, cost_of(step)
    for m in range(shape.microbatches):
        slices = split_sizes(work.tokens(m, shape.microbatches), shape.slices)
        for c, tokens in enumerate(slices):
            assert (cost.rows[:, m, c].sum(axis=-1) == tokens * work.top_k).all()
            assert (cost.rows[:, m, c] <= tokens).all()


@given(steps(capacity=False))
def test_a_microbatch_has_the_rows_of_its_samples(step: Step) -> None:
    (shape, work, _), cost = step, cost_of(step)
    ends = np.cumsum(split_sizes(work.batch, shape.microbatches))
    for m, samples in enumerate(np.split(cost.counts_DBYE, ends[:-1], axis=1)):
        assert (cost.rows[:, m].sum(axis=1) == samples.sum(axis=1)).all()


@given(steps())
def test_experts_compute_every_row_once_in_either_direction(step: Step) -> None:
    """With almost no overheads, the experts' seconds do not depend on how many chunks there are."""
    shape, work, routing = step
    free = replace(CLUSTER, task_overhead_s=1e-12)
    cut = RoutedCost(shape, work, free, routing.counts(0))
    whole = RoutedCost(replace(shape, chunks=1, degree_backward=0), work, free, routing.counts(0))

    def experts_s(cost: RoutedCost, *, forward: bool) -> Any:
        tasks = build_graph(cost.shape).tasks
        return sum(cost.seconds(t) for t in tasks if t.op == Op.EXPERTS and t.forward is forward)

    for forward in (True, False):
        ours, theirs = (experts_s(cost, forward=forward) for cost in (cut, whole))
        np.testing.assert_allclose(ours, theirs, atol=1e-10)  # the overheads of some dozens of tasks


@given(steps(capacity=False))
def test_exchanged_counts_say_the_splits(step: Step) -> None:
    (shape, work, routing), cost = step, cost_of(step)
    shape = replace(shape, exchange_counts=True)
    cost = RoutedCost(shape, work, CLUSTER, routing.counts(0))
    own = build_graph(shape).by_name
    for task in (t for t in own.values() if t.op == Op.COUNTS):
        for rank in range(work.world_size):
            sent, received = cost.moves.exchanged_counts(task, rank)
            assert (
                sent.shape
                == received.shape
                == (
                    work.ep_size,
                    shape.slices,
                    work.num_experts // work.ep_size,
                )
            )
            for chunk in range(shape.chunks):
                dispatch = own[task.name._replace(op=Op.DISPATCH, chunk=chunk)]
                splits, held = splits_of(cost, dispatch, rank), list(dispatch.cut.held)
                assert sent[:, held].sum(axis=(1, 2)).tolist() == splits[0]
                assert received[:, held].sum(axis=(1, 2)).tolist() == splits[1]


# ---- seconds -----------------------------------------------------------------------------------------------


@given(steps(capacity=True))
def test_with_a_capacity_every_rank_costs_what_the_plan_assumes(step: Step) -> None:
    (shape, work, _), cost = step, cost_of(step)
    even = StepCost(shape, work, CLUSTER)
    for task in build_graph(shape).tasks:
        assert cost(task) == pytest.approx(np.full(work.world_size, even(task)))


@given(steps(capacity=False))
def test_experts_of_all_ranks_cost_together_what_the_plan_assumes(step: Step) -> None:
    (shape, work, _), cost = step, cost_of(step)
    even = StepCost(shape, work, CLUSTER)
    for task in build_graph(shape).tasks:
        seconds = cost(task)
        assert seconds.shape == (work.world_size,)
        if task.lane is Lane.COMPUTE:
            assert seconds.sum() == pytest.approx(work.world_size * even(task))
            assert (seconds >= CLUSTER.task_overhead_s * (1 - 1e-9)).all()
        elif task.op not in (Op.DISPATCH, Op.COMBINE):
            assert (seconds == even(task)).all()
        if task.lane is Lane.COMPUTE and task.op != Op.EXPERTS:
            assert (seconds == even(task)).all()


SHARING = [(2, 2, 2), (2, 1, 4), (1, 2, 2), (4, 4, 1), (1, 4, 1)]
"""tp, etp and ep of four ranks."""


@pytest.mark.parametrize("tokens", ["split", "replicated"])
@pytest.mark.parametrize(("tp", "etp", "ep"), SHARING)
@pytest.mark.parametrize("form", ["gather", "s1", "s2", "baseline"])
def test_where_ranks_share_equal_parts_every_rank_costs_what_the_plan_assumes(
    form: ExpertForm, tp: int, etp: int, ep: int, tokens: TokenLayout
) -> None:
    sharing = Sharing(tp_size=tp, etp_size=etp, tokens=tokens)
    shape = StepShape(moe_layers=(True, False, True), microbatches=2, sharing=sharing, expert_form=form)
    work = Workload(
        batch=4, seq_len=16, hidden_size=8, ffn_hidden_size=16, vocab_size=16, num_experts=8, top_k=2,
        expert_matrices=2, capacity_factor=4.0, min_capacity=0, world_size=4, ep_size=ep, element_bytes=4,
        all_reduce_bytes=(800,) * 3, expert_all_reduce_bytes=(0,) * 3, partial_all_reduce_bytes=(400,) * 3,
        tp_size=tp, etp_size=etp, dense_ffn_hidden_size=16, devices_per_node=max(tp, etp),
    )  # fmt: skip
    counts = np.full((4 // tp, 4, 2, 8), 4)
    cost, even = RoutedCost(shape, work, CLUSTER, counts), StepCost(shape, work, CLUSTER)
    for task in build_graph(shape).tasks:
        alone = task.op in TRANSFERS and ep == 1 and task.axes == Group.EXPERT
        assert cost(task) == pytest.approx(np.full(4, 0.0 if alone else even(task))), task


def written_out() -> RoutedCost:
    """Two ranks with two samples of four tokens, one choice; all of the first rank go to the second."""
    shape = StepShape(moe_layers=(False, True), microbatches=2)
    work = Workload(
        batch=2, seq_len=4, hidden_size=10, ffn_hidden_size=100, vocab_size=50, num_experts=2, top_k=1,
        expert_matrices=2, capacity_factor=None, min_capacity=4, world_size=2, ep_size=2, element_bytes=4,
        all_reduce_bytes=(400, 400), expert_all_reduce_bytes=(0, 0),
    )  # fmt: skip
    counts = np.array([[[[0, 4]], [[0, 4]]], [[[1, 3]], [[4, 0]]]])
    return RoutedCost(shape, work, CLUSTER, counts)


def test_seconds_written_out() -> None:
    cost = written_out()
    graph = build_graph(cost.shape)

    def task(name: str) -> Task:
        return task_at(graph, name)

    row_s = 2 * 2 * 10 * 100 / 1e9 + 2 * 10 * 4 / 1e8
    assert cost(task("L1.X.m0.c0.F")) == pytest.approx([1e-2 + row_s, 1e-2 + 7 * row_s])
    assert cost(task("L1.X.m1.c0.B")) == pytest.approx([1e-2 + 8 * row_s, 1e-2 + 8 * row_s])
    # Rank 0 sends four rows to rank 1 and gets one; then four and four.
    assert cost(task("L1.D.m0.c0.F")) == pytest.approx([1e-3 + 160 / 1e7] * 2)
    assert cost(task("L1.C.m1.c0.B")) == pytest.approx([1e-3 + 160 / 1e7] * 2)
    assert splits_of(cost, task("L1.D.m0.c0.F"), 0) == ([0, 4], [0, 1])
    assert splits_of(cost, task("L1.C.m0.c0.F"), 0) == ([0, 1], [0, 4])


@pytest.mark.parametrize("alpha_s", [5e-3, 0.0])
def test_what_experts_take_for_any_number_of_rows_is_not_taken_for_each(alpha_s: float) -> None:
    """A cluster's overhead is that of a task it has no measured model of."""
    by_rates, models = (
        written_out(),
        (TaskModel(op=Op.EXPERTS, phase=Phase.FORWARD, alpha_s=alpha_s, scale=0.01),),
    )
    file = ClusterFile(name="measured", nodes=1, ranks_per_node=2, rates=CLUSTER, tasks=models)
    cost = replace(by_rates, cluster=ProfiledCluster.build(file))
    row_s = 2 * 2 * 10 * 100 / 1e9 + 2 * 10 * 4 / 1e8
    found = cost(task_at(build_graph(cost.shape), "L1.X.m0.c0.F"))
    assert found == pytest.approx([alpha_s + 0.01 * row_s, alpha_s + 0.07 * row_s])


def test_a_transfer_of_nothing_costs_nothing() -> None:
    cost = written_out()
    stay = replace(cost, counts_DBYE=np.array([[[[4, 0]], [[4, 0]]], [[[0, 4]], [[0, 4]]]]))
    assert stay(task_at(build_graph(stay.shape), "L1.D.m0.c0.F")).tolist() == [0.0, 0.0]


@draws(25)
@given(steps(), st.sampled_from(sorted(SCHEDULES)))
def test_the_simulator_predicts_it(step: Step, name: str) -> None:
    """Orders are frozen from costs per rank, and no simulated step beats its bound."""
    shape, work, routing = step
    plan = planned(
        name,
        shape,
        lambda cut: RoutedCost(cut, work, CLUSTER, routing.counts(0)),
        microbatches=shape.microbatches,
        chunks=shape.chunks,
    )
    cost = RoutedCost(plan.shape, work, CLUSTER, routing.counts(0))
    ranks = work.mesh
    timeline = simulate(plan.schedule, plan.graph, cost, ranks)
    assert timeline.iteration_s >= lower_bound(plan.graph, cost, ranks).seconds * (1 - 1e-9)
    assert timeline.iteration_s >= cost.solo_s(plan.graph.tasks).max() * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hierarchical_1d", "hierarchical_2d"])
@given(step=steps(capacity=True), node_size=st.sampled_from([1, 2]))
def test_with_a_capacity_the_busiest_rank_of_a_leg_costs_what_the_plan_assumes(
    name: str, step: Step, node_size: int
) -> None:
    shape, work, routing = step
    shape = replace(shape, dispatch=DISPATCHES[name].hops)
    work = replace(work, dispatch=name, node_size=min(node_size, work.ep_size))
    cost, even = RoutedCost(shape, work, CLUSTER, routing.counts(0)), StepCost(shape, work, CLUSTER)
    for task in build_graph(shape).tasks:
        if task.op in TRANSFERS:
            share = even_leg(name, task.op, work.nodes, work.ranks_per_node).share
            expected = even(task) if share else 0.0
            assert cost(task).max() == pytest.approx(expected)


@pytest.mark.slow
@given(step=steps(), node_size=st.sampled_from([1, 2, 4]))
def test_joined_rows_are_sent_to_who_expects_them_and_no_more_often_than_by_choice(
    step: Step, node_size: int
) -> None:
    shape, work, routing = step
    flat = RoutedCost(shape, work, CLUSTER, routing.counts(0))
    shape = replace(shape, dispatch=DISPATCHES["node_once"].hops, exchange_counts=True)
    work = replace(work, dispatch="node_once", node_size=gcd(node_size, work.ep_size))
    cost = RoutedCost(shape, work, CLUSTER, routing.counts(0))
    for task in build_graph(shape).tasks:
        if task.op not in TRANSFERS:
            continue
        found = [cost.moves.move(task, rank) for rank in range(work.world_size)]
        fresh = RoutedCost(shape, work, CLUSTER, routing.counts(0))
        assert fresh.moves.move(task, 0) == found[0], "what is known of one task is not told of another"
        for rank, mine in enumerate(found):
            members = work.mesh.members(rank, mine.group)
            place = work.mesh.place(rank, mine.group)
            assert list(mine.output_splits) == [found[peer].input_splits[place] for peer in members]
            assert mine.row_bytes == work.element_bytes * (
                work.hidden_size + (2 * work.top_k if task.op in COMBINE_OF else 0)
            )
        if task.op == Op.DISPATCH_SCATTER and work.capacity_factor is None:
            by_choice = renamed(task, op=Op.DISPATCH)
            assert sum(sum(each.input_splits) for each in found) <= sum(
                sum(flat.moves.move(by_choice, rank).input_splits) for rank in range(work.world_size)
            )


@pytest.mark.slow
@given(steps(), st.randoms(use_true_random=False))
def test_rows_go_to_the_rank_that_has_their_expert(step: Step, random: Random) -> None:
    shape, work, routing = step
    experts = list(range(work.num_experts))
    random.shuffle(experts)
    slots = work.placement.slots
    placement = ExpertPlacement.of(
        [experts[rank * slots : (rank + 1) * slots] for rank in range(work.ep_size)]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workload, "placement", placement)
        cost = RoutedCost(shape, work, CLUSTER, routing.counts(0))
        for task in moves(shape):
            rows_PE = cost.rows[
                :, task.microbatch, task.cut.first : task.cut.stop, moe_layer(cost, task)
            ].sum(1)
            for target in range(work.ep_size):
                sent = by_source_and_target(rows_PE, placement)[:, :, 0, target]
                assert (sent.reshape(-1, slots) == rows_PE[:, placement.held(target)]).all()
        if work.dispatch == "flat" and any(shape.moe_layers):
            task = next(task for task in moves(shape) if task.op == Op.DISPATCH and task.forward)
            rows_PE = cost.rows[
                :, task.microbatch, task.cut.first : task.cut.stop, moe_layer(cost, task)
            ].sum(1)
            sent_to = [rows_PE[0, placement.held(target)].sum() for target in range(work.ep_size)]
            assert splits_of(cost, task, 0)[0] == sent_to
