"""The published systems: how each cuts an iteration and in which order it runs the pieces."""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.graph import Lane, Op, Phase, StepShape, Task, build_graph
from penstock.schedule import SCHEDULES, Pieces, ScheduleConfig, StepPlan, plan_step
from penstock.schedule.system import is_all_reduce, pieces_of, whole
from penstock.simulate import simulate
from tests.steps import (
    PICTURE_WIDTH,
    Times,
    example_plan,
    of_phase,
    overlapping,
    pieces_for,
    random_seconds,
    ready_s,
    seeds,
    shapes,
)

F, B = Phase.FORWARD, Phase.BACKWARD


def run(name: str, shape: StepShape, pieces: Pieces, seed: int) -> tuple[StepPlan, Times]:
    """Plan with random durations, and simulate the plan on one rank with the same durations."""
    seconds: dict[Task, float] = {}

    def cost_of(cut: StepShape) -> Any:
        seconds.update(random_seconds(build_graph(cut), seed))
        return seconds.__getitem__

    plan = plan_step(SCHEDULES[name], shape, pieces, cost_of)
    times = simulate(plan.schedule, plan.graph, seconds.__getitem__).times
    return plan, {task: (float(when.start[0]), float(when.end[0])) for task, when in times.items()}


def uncut(shape: StepShape) -> StepShape:
    """What systems are given to cut. The first layer has replicated gradients, as in every model."""
    first, *others = shape.all_reduce_chunks
    return replace(shape, microbatches=1, chunks=1, all_reduce_chunks=(max(1, first), *others))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_docstring_shows_the_schedule(name: str) -> None:
    plan = example_plan(name)
    picture = plan.schedule.grid(plan.graph, width=PICTURE_WIDTH)
    doc = inspect.getdoc(type(SCHEDULES[name]))
    assert doc is not None
    assert doc.endswith("\n\n" + picture.rstrip("\n"))


def test_systems_carry_their_names() -> None:
    assert {name: system.name for name, system in SCHEDULES.items()} == {
        name: name for name in ("sequential", "moe_pipeline", "flowmoe", "penstock")
    }


# ---- sequential --------------------------------------------------------------------------------------------


@given(shapes(plain=True), seeds)
def test_sequential_overlaps_nothing(shape: StepShape, seed: int) -> None:
    _, times = run("sequential", uncut(shape), pieces_for(uncut(shape)), seed)
    assert list(overlapping(times)) == []


@pytest.mark.parametrize("name", ["sequential", "moe_pipeline"])
@given(shape=shapes(plain=True), seed=seeds)
def test_whole_all_reduces_come_after_the_last_backward_computation(
    name: str, shape: StepShape, seed: int
) -> None:
    plan, times = run(name, uncut(shape), pieces_for(uncut(shape)), seed)
    computed = max(end for task, (_, end) in times.items() if task.lane is Lane.COMPUTE)
    reduced = [task for task in plan.graph.tasks if is_all_reduce(task)]
    assert all(times[task][0] >= computed for task in reduced)
    assert [(t.layer, t.op) for t in reduced if t.chunk != 0] == []
    with_gradients = {i for i, chunks in enumerate(uncut(shape).all_reduce_chunks) if chunks}
    assert {t.layer for t in reduced if t.op is Op.ALL_REDUCE} == with_gradients


# ---- moe_pipeline ------------------------------------------------------------------------------------------


@given(shapes(plain=True), seeds, st.integers(1, 4))
def test_moe_pipeline_overlaps_inside_moe_layers_alone(shape: StepShape, seed: int, chunks: int) -> None:
    plan, times = run("moe_pipeline", uncut(shape), pieces_for(uncut(shape), chunks=chunks), seed)
    assert plan.graph.shape.chunks == chunks
    for compute, network in overlapping(times):
        assert compute.op is Op.EXPERTS and network.op in (Op.DISPATCH, Op.COMBINE)
        assert (compute.layer, compute.phase) == (network.layer, network.phase)
        assert compute.chunk != network.chunk


@given(shapes(dense=False, plain=True), seeds, st.integers(2, 4))
def test_moe_pipeline_computes_while_the_next_chunk_is_under_way(
    shape: StepShape, seed: int, chunks: int
) -> None:
    _, times = run("moe_pipeline", uncut(shape), pieces_for(uncut(shape), chunks=chunks), seed)
    pairs = {(str(compute), str(network)) for compute, network in overlapping(times)}
    for layer in range(shape.num_layers):
        assert (f"L{layer}.X.m0.c0.F", f"L{layer}.D.m0.c1.F") in pairs
        assert (f"L{layer}.X.m0.c0.B", f"L{layer}.C.m0.c1.B") in pairs


# ---- flowmoe -----------------------------------------------------------------------------------------------


@given(shapes(dense=False, plain=True), seeds, st.integers(1, 4))
def test_flowmoe_computes_and_exchanges_in_the_published_order(
    shape: StepShape, seed: int, microbatches: int
) -> None:
    """Eq. 2 and 3 forward, Eq. 4 and 5 backward; every op of all pieces before the next op."""
    plan, _ = run("flowmoe", uncut(shape), pieces_for(shape, microbatches=microbatches), seed)
    up, down = range(microbatches), range(microbatches - 1, -1, -1)
    layers = range(shape.num_layers)

    def served(lane: Lane, phase: Phase, *ops: Op) -> list[Task]:
        return [task for task in of_phase(plan.schedule.lanes[lane], phase) if task.op in ops]

    def forward(op: Op, layer: int) -> list[Task]:
        return [Task(layer, op, F, m, 0 if op is not Op.ATTENTION else None) for m in up]

    def backward(op: Op, layer: int) -> list[Task]:
        return [Task(layer, op, B, m, 0 if op is not Op.ATTENTION else None) for m in down]

    compute, exchange = (Op.ATTENTION, Op.EXPERTS), (Op.DISPATCH, Op.COMBINE)
    assert served(Lane.COMPUTE, F, *compute) == [t for n in layers for op in compute for t in forward(op, n)]
    assert served(Lane.INTER, F, *exchange) == [t for n in layers for op in exchange for t in forward(op, n)]
    assert served(Lane.COMPUTE, B, *compute) == [
        t for n in reversed(layers) for op in reversed(compute) for t in backward(op, n)
    ]
    assert served(Lane.INTER, B, *exchange) == [
        t for n in reversed(layers) for op in reversed(exchange) for t in backward(op, n)
    ]


@given(shapes(chunks=2), seeds, st.integers(1, 4))
def test_flowmoe_starts_no_all_reduce_while_an_all_to_all_is_ready(
    shape: StepShape, seed: int, microbatches: int
) -> None:
    plan, times = run("flowmoe", shape, pieces_for(shape, microbatches=microbatches), seed)
    order = plan.schedule.lanes[Lane.INTER]
    for i, task in enumerate(order):
        if is_all_reduce(task):
            for other in order[i + 1 :]:
                assert is_all_reduce(other) or ready_s(other, plan.graph, times) > times[task][0]


@given(shapes(chunks=2), seeds, st.integers(1, 4))
def test_flowmoe_starts_an_all_reduce_as_soon_as_the_network_has_nothing_else(
    shape: StepShape, seed: int, microbatches: int
) -> None:
    plan, times = run("flowmoe", shape, pieces_for(shape, microbatches=microbatches), seed)
    order, free_s = plan.schedule.lanes[Lane.INTER], 0.0
    ready = {task: ready_s(task, plan.graph, times) for task in order}
    for i, task in enumerate(order):
        if free_s < times[task][0]:
            assert all(ready[other] >= times[task][0] for other in order[i:] if is_all_reduce(other))
        free_s = times[task][1]


@given(shapes(chunks=1), st.integers(1, 4))
def test_flowmoe_cuts_the_batch_and_the_gradients(shape: StepShape, microbatches: int) -> None:
    cut = SCHEDULES["flowmoe"].shape(shape, pieces_for(shape, microbatches=microbatches))
    assert cut == replace(shape, microbatches=microbatches)


def test_flowmoe_serves_an_all_reduce_in_order_of_its_chunks() -> None:
    shape = StepShape(moe_layers=(True, True, False), all_reduce_chunks=(3, 2, 2))
    plan, _ = run("flowmoe", shape, pieces_for(shape), 0)
    served: dict[int, list[int | None]] = defaultdict(list)
    for task in plan.schedule.lanes[Lane.INTER]:
        if is_all_reduce(task):
            served[task.layer].append(task.chunk)
    assert served == {0: [0, 1, 2], 1: [0, 1], 2: [0, 1]}


# ---- pieces ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**6)), st.integers(512, 10**5))
def test_as_many_pieces_as_it_takes_and_no_more(sizes: list[int], chunk: int) -> None:
    for size, pieces in zip(sizes, pieces_of(tuple(sizes), chunk), strict=True):
        assert (pieces - 1) * chunk < size <= pieces * chunk or pieces == size == 0
    assert whole(tuple(sizes)) == tuple(int(size > 0) for size in sizes)


# ---- configuration -----------------------------------------------------------------------------------------


def test_a_section_becomes_pieces() -> None:
    config = ScheduleConfig(name="moe_pipeline", microbatches=3, chunks=4, all_reduce_chunk_bytes=2048)
    assert config.system is SCHEDULES["moe_pipeline"]
    assert config.pieces((1, 2), (3, 4)) == Pieces(
        microbatches=3,
        chunks=4,
        all_reduce_chunk_bytes=2048,
        all_reduce_bytes=(1, 2),
        expert_all_reduce_bytes=(3, 4),
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"name": "tutel"}, "Nearest: sequential. All: sequential, moe_pipeline, flowmoe"),
        ({"microbatches": 0}, "microbatches = 0: a batch is cut into 1 to 256 pieces"),
        ({"chunks": -1}, "chunks = -1: a batch is cut into 1 to 256 pieces"),
        ({"all_reduce_chunk_bytes": 511}, "all_reduce_chunk_bytes = 511: every chunk costs"),
        ({"refine_after": -1}, "refine_after = -1: is a number of steps"),
    ],
)
def test_settings_that_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScheduleConfig(**setting)
