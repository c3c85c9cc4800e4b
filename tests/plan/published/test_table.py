"""Published planners on problems: what they read off the costs, and what their choices mean."""

from __future__ import annotations

import random
from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import ClusterConfig
from penstock.decision import MOST_SLICES, Decision, Partition, ScheduleConfig
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Phase
from penstock.ops import Op
from penstock.ops.core import FLAT, Hop, summed
from penstock.plan import Problem
from penstock.plan.published import (
    PUBLISHED,
    Durations,
    adaptive,
    flowmoe_choice,
    flowmoe_published_choice,
    fsmoe_choice,
    idle_only,
    makespan_s,
    pipemoe_choice,
    sequential_choice,
)
from penstock.plan.published.degree import DEGREES, Backward, total_s
from penstock.plan.published.partition import Filling, PartitionPlanner
from penstock.plan.published.table import apart
from penstock.step import StepShape
from penstock.step.shape import Sharing
from tests.plan import problems
from tests.plan.published.layers import random_part
from tests.steps import task_at
from tests.support.draws import draws

SLOW_LINK = ClusterConfig(
    flops_per_s=1e12, link_bytes_per_s=2e9, link_latency_s=2e-5, intra_bytes_per_s=8e9, intra_latency_s=1e-5
)


def problem(
    moe_layers: tuple[bool, ...] = (True, True),
    *,
    batch: int = 4,
    cluster: ClusterConfig = SLOW_LINK,
    dispatch: tuple[Hop, ...] = FLAT,
    shards: int = 1,
    all_reduce_bytes: int = 4 << 20,
) -> Problem:
    """Four ranks, or groups of ranks that share attention and experts, with one expert each."""
    layers = len(moe_layers)
    plain = problems.problem(moe_layers, batch=batch, all_reduce_bytes=all_reduce_bytes)
    workload = replace(
        plain.workload,
        seq_len=840,
        hidden_size=512,
        ffn_hidden_size=2048,
        dense_ffn_hidden_size=2048,
        vocab_size=1,
        world_size=4 * shards,
        partial_all_reduce_bytes=(1 << 14 if shards > 1 else 0,) * layers,
        tp_size=shards,
        etp_size=shards,
        node_size=1 if shards > 1 else 0,
    )
    sharing = Sharing(tp_size=shards, etp_size=shards)
    shape = StepShape(moe_layers=moe_layers, exchange_counts=False, dispatch=dispatch, sharing=sharing)
    return Problem(shape=shape, workload=workload, cluster=cluster)


def iteration_s(asked: Problem, choice: Decision) -> float:
    return asked.simulate(choice, asked.plan(choice)).iteration_s


@pytest.mark.few(24)
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("moe_layers", [(True,), (True, False, True, False), (False, True, True), (False,)])
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_every_choice_is_a_plan_that_runs(name: str, moe_layers: tuple[bool, ...], batch: int) -> None:
    asked = problem(moe_layers, batch=batch)
    choice = PUBLISHED[name](asked)
    plan = asked.plan(choice)  # checks that every task is there once and that no lane deadlocks
    reduced = [task for task in plan.graph.tasks if task.op == Op.ALL_REDUCE]
    assert {task.layer for task in reduced} == set(range(len(moe_layers)))
    ScheduleConfig(
        name=choice.schedule,
        microbatches=choice.microbatches,
        chunks=choice.chunks,
        backward_chunks=choice.backward_chunks,
        all_reduce_chunk_bytes=choice.all_reduce_chunk_bytes,
    )  # a configuration can say the same


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_the_formula_is_what_a_problem_simulates(phase: Phase, degree: int) -> None:
    """On three lanes, with chunks that are all equal."""
    asked = problem((True,), shards=2)
    choice = Decision(schedule="moe_pipeline", chunks=degree, backward_chunks=degree)
    times = asked.simulate(choice, asked.plan(choice)).times
    chain = {Op.DISPATCH, Op.SHARD_GATHER, Op.EXPERTS, Op.SHARD_SCATTER, Op.COMBINE}
    spans = [span for task, span in times.items() if task.op in chain and task.phase is phase]
    start_s, end_s = min(s.start.min() for s in spans), max(s.end.max() for s in spans)
    expected_s = makespan_s(Durations(asked).part(0, phase), degree)
    assert end_s - start_s == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("name", PUBLISHED)
def test_ranks_that_share_experts_have_plans_too(name: str) -> None:
    asked = problem((True, False, True), shards=2)
    choice = PUBLISHED[name](asked)
    plan = asked.plan(choice)
    reduced = [(task.op, task.layer) for task in plan.graph.tasks if summed(task.op) and not task.piece]
    assert {op for op, _ in reduced} == {Op.ALL_REDUCE, Op.PARTIAL_ALL_REDUCE}
    assert len(reduced) == 2 * 3


def test_dense_time_is_what_lies_between_two_moe_parts() -> None:
    asked = problem((True, False, True), shards=2)
    cost, graph = asked.cost(Decision(), asked.shape), build_graph(asked.shape)
    top, last = (gap.dense_s for gap in Durations(asked).backward().gaps)
    dense = ("FA", "FS", "FF", "FG", "FN", "TS", "TA", "TG")
    names = [*(f"L2.{op}" for op in ("GT", "TS", "TA", "TG")), *(f"L1.{op}" for op in dense), "L0.U"]
    assert top == pytest.approx(sum(cost(task_at(graph, f"{name}.m0.B")) for name in names))
    lowest = ("GT", "TS", "TA", "TG", "ES", "EM")
    assert last == pytest.approx(sum(cost(task_at(graph, f"L0.{op}.m0.B")) for op in lowest))


def test_durations_are_those_of_the_cluster() -> None:
    asked = problem((True,))
    link = asked.cluster.all_to_all(4)
    part = Durations(asked).part(0, Phase.FORWARD)
    rows_bytes = 4 * 840 * 2 * 512 * 4
    assert part.a2a.alpha_s == pytest.approx(link.alpha_s)
    assert part.a2a.linear_s == pytest.approx(link.beta_s_per_byte * rows_bytes)
    assert part.ag.chunk_s(1) == part.rs.chunk_s(1) == 0.0
    assert part.experts.alpha_s == pytest.approx(asked.cluster.task_overhead_s)


def test_the_way_back_has_gaps_with_what_is_computed_in_them() -> None:
    asked = problem((True, False, True))
    backward = Durations(asked).backward()
    assert [gap.layer for gap in backward.gaps] == [2, 0]
    assert [[made.layer for made in gap.made] for gap in backward.gaps] == [[2, 1], [0]]
    assert backward.above == ()
    cost, graph = asked.cost(Decision(), asked.shape), build_graph(asked.shape)
    attention_s = [cost(task_at(graph, f"L{layer}.AT.m0.B")) for layer in range(3)]
    unorder_s = cost(task_at(graph, "L0.U.m0.B"))
    assert backward.gaps[0].dense_s == pytest.approx(attention_s[2] + attention_s[1] + unorder_s)


def test_gradients_of_dense_blocks_on_top_are_there_from_the_start() -> None:
    backward = Durations(problem((True, False, False))).backward()
    assert [made.layer for made in backward.above] == [2, 1]


def at_the_tail(backward: Backward) -> Partition:
    """Nothing is hidden."""
    filling = Filling(backward)
    for gap in backward.gaps:
        filling.make(gap.made)
    return filling.partition()


@pytest.mark.parametrize("partition", [adaptive, idle_only, at_the_tail])
def test_fsmoe_runs_by_any_partition(partition: PartitionPlanner) -> None:
    asked = problem((True, True, True))
    choice = fsmoe_choice(asked, partition)
    parts = asked.plan(choice).shape.all_reduce_parts
    assert [sum(sizes) for sizes in parts] == list(asked.workload.all_reduce_bytes)
    assert lcm(*choice.degrees) <= MOST_SLICES


def test_pipelining_beats_none_and_gaps_beat_the_tail() -> None:
    asked = problem((True,) * 4, all_reduce_bytes=64 << 20)
    plain_s = iteration_s(asked, sequential_choice(asked))
    piped_s = iteration_s(asked, pipemoe_choice(asked))
    at_the_tail_s = iteration_s(asked, fsmoe_choice(asked, at_the_tail))
    filled_s = iteration_s(asked, fsmoe_choice(asked))
    assert filled_s < at_the_tail_s <= piped_s < plain_s


@draws(20)
@given(megabytes=st.integers(1, 64), latency_us=st.integers(1, 2000))
def test_filling_idle_time_lengthens_no_simulated_step(megabytes: int, latency_us: int) -> None:
    """Reductions that fit cost nothing: a step is no longer than with all of them at its end."""
    cluster = replace(SLOW_LINK, link_latency_s=latency_us * 1e-6)
    asked = problem((True,) * 3, cluster=cluster, all_reduce_bytes=megabytes << 20)
    filled = fsmoe_choice(asked, idle_only)
    behind = replace(filled, partition=fsmoe_choice(asked, at_the_tail).partition)
    assert iteration_s(asked, filled) <= iteration_s(asked, behind) * (1 + 1e-9) + (
        3 * asked.cluster.all_reduce(4).alpha_s  # a layer in several portions starts up several times
    )


@pytest.mark.slow
def test_flowmoe_cuts_a_batch_into_divisors_and_takes_the_best_by_simulation() -> None:
    asked = problem(batch=4)
    tuned, published = flowmoe_choice(asked), flowmoe_published_choice(asked)
    assert tuned.microbatches in (2, 4)
    assert published.microbatches == 2
    assert iteration_s(asked, tuned) <= iteration_s(asked, published)
    assert flowmoe_choice(problem(batch=3)).microbatches == 1


@given(seed=st.integers(0, 2**32))
def test_degrees_apart_leave_no_crumbs_and_are_the_best_that_do_not(seed: int) -> None:
    rng = random.Random(seed)
    forward, back = ([(random_part(rng), 0.0) for _ in range(2)] for _ in range(2))
    chunks, backward_chunks = apart(forward, back, DEGREES)
    pairs = [(f, b) for f in DEGREES for b in DEGREES if lcm(f, b) <= MOST_SLICES]
    assert (chunks, backward_chunks) in pairs
    best_s = min(total_s(forward, f) + total_s(back, b) for f, b in pairs)
    assert total_s(forward, chunks) + total_s(back, backward_chunks) == pytest.approx(best_s)


def test_flowmoe_cuts_partial_gradients_too() -> None:
    """Where attention is frozen they may be all that there is to cut."""
    asked = problem((True, True), shards=2, all_reduce_bytes=0)
    work = replace(asked.workload, partial_all_reduce_bytes=(1 << 22,) * 2)
    assert flowmoe_choice(replace(asked, workload=work)).all_reduce_chunk_bytes >= 1 << 18


def test_a_long_model_is_tuned_on_a_few_of_its_layers() -> None:
    long, short = problem((True,) * 12), problem((True,) * 4)
    assert flowmoe_choice(long) == flowmoe_choice(short)


def test_no_more_chunks_than_tokens() -> None:
    asked = problem(batch=1)
    short = replace(asked, workload=replace(asked.workload, seq_len=3))
    choice = fsmoe_choice(short)
    assert max(choice.degrees) <= 3


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_dispatch_with_legs_on_both_sides_is_planned_as_an_estimate(dispatch: str) -> None:
    asked = problem((True, True), dispatch=DISPATCHES[dispatch].hops)
    nodes = replace(asked.workload, dispatch=dispatch, node_size=2)
    asked = replace(asked, workload=nodes, dispatches=(dispatch,))
    for plan in PUBLISHED.values():
        choice = plan(asked)
        assert choice.dispatch == dispatch
        assert iteration_s(asked, choice) > 0
