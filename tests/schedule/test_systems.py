"""The published systems: how each cuts an iteration and in which order it runs the pieces."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.decision import TAIL, GradientBytes, Partition, Portion, Slot
from penstock.graph import Lane, Name, Phase, ScheduleError, Task
from penstock.ops import Op
from penstock.schedule import SCHEDULES, StepPlan, cut, plan_step, unit_cost
from penstock.schedule.system import is_all_reduce, pieces_of, whole
from penstock.step import StepShape
from tests.steps import (
    CUT_INSIDE,
    PICTURE_WIDTH,
    decision,
    example_plan,
    gradients_of,
    of_phase,
    overlapping,
    planned,
    ready_s,
    seeds,
    shapes,
)
from tests.steps import run_alone as run

F, B = Phase.FORWARD, Phase.BACKWARD


def uncut(shape: StepShape) -> StepShape:
    """What systems are given to cut. The first layer has replicated gradients, as in every model."""
    first, *others = shape.pieces["replicated"]
    first_has_some = (max(1, first), *others)
    return replace(
        shape,
        microbatches=1,
        chunks=1,
        degree_backward=0,
        pieces={**shape.pieces, "replicated": first_has_some},
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_docstring_shows_the_schedule(name: str) -> None:
    plan = example_plan(name)
    picture = plan.schedule.grid(plan.graph, width=PICTURE_WIDTH)
    doc = inspect.getdoc(type(SCHEDULES[name]))
    assert doc is not None
    assert doc.endswith("\n\n" + picture.rstrip("\n"))


degrees = st.integers(1, 4)


@pytest.mark.parametrize("name", CUT_INSIDE)
@given(shapes(), degrees, degrees)
def test_chunks_of_both_phases_are_as_asked_for(
    name: str, shape: StepShape, chunks: int, backward: int
) -> None:
    """Of any shape: with dense layers, legs inside nodes, shared experts. `plan_step` checks the order."""
    whole = uncut(shape)
    one = partial(
        decision, name, microbatches=1, chunks=chunks, priority="critical_path"
    )  # a search takes long
    plan = plan_step(one(backward_chunks=backward), whole, gradients_of(whole), lambda _: unit_cost)
    assert plan.shape.degrees == (chunks, backward)
    assert cut(one(), whole, gradients_of(whole)).degrees == (chunks, chunks)


# ---- sequential --------------------------------------------------------------------------------------------


@given(shapes(plain=True), seeds)
def test_sequential_overlaps_nothing(shape: StepShape, seed: int) -> None:
    _, times = run("sequential", uncut(shape), seed)
    assert list(overlapping(times)) == []


@pytest.mark.parametrize("name", ["sequential", "moe_pipeline"])
@given(shape=shapes(plain=True), seed=seeds)
def test_whole_all_reduces_come_after_the_last_backward_computation(
    name: str, shape: StepShape, seed: int
) -> None:
    plan, times = run(name, uncut(shape), seed)
    computed = max(end for task, (_, end) in times.items() if task.lane is Lane.COMPUTE)
    reduced = [task for task in plan.graph.tasks if is_all_reduce(task)]
    assert all(times[task][0] >= computed for task in reduced)
    assert [(t.layer, t.op) for t in reduced if t.piece != 0] == []
    with_gradients = {i for i, chunks in enumerate(uncut(shape).pieces["replicated"]) if chunks}
    assert {t.layer for t in reduced if t.op == Op.ALL_REDUCE} == with_gradients


# ---- moe_pipeline ------------------------------------------------------------------------------------------


@given(shapes(plain=True), seeds, st.integers(1, 4))
def test_moe_pipeline_overlaps_inside_moe_layers_alone(shape: StepShape, seed: int, chunks: int) -> None:
    plan, times = run("moe_pipeline", uncut(shape), seed, chunks=chunks)
    assert plan.shape.chunks == chunks
    for compute, network in overlapping(times):
        assert compute.op == Op.EXPERTS and network.op in (Op.DISPATCH, Op.COMBINE)
        assert (compute.layer, compute.phase) == (network.layer, network.phase)
        assert compute.chunk != network.chunk


# ---- dense_overlap, fsmoe ----------------------------------------------------------------------------------


def between_all_to_alls(plan: StepPlan) -> list[tuple[Task, int]]:
    """Reductions that stand in the lane between a layer's first C.B and its last D.B, and that layer."""
    order = plan.schedule.lanes.get(Lane.INTER, ())
    found: list[tuple[Task, int]] = []
    for layer, is_moe in enumerate(plan.shape.moe_layers):
        if is_moe:
            moved = [i for i, t in enumerate(order) if is_move_back(t, layer)]
            found += [(t, layer) for t in order[moved[0] : moved[-1]] if is_all_reduce(t)]
    return found


def is_move_back(task: Task, layer: int) -> bool:
    return task.layer == layer and task.phase is B and task.op in (Op.DISPATCH, Op.COMBINE)


@given(shapes(), seeds, degrees, degrees)
def test_dense_overlap_reduces_under_dense_parts_only(
    shape: StepShape, seed: int, chunks: int, backward: int
) -> None:
    plan, _ = run("dense_overlap", uncut(shape), seed, chunks=chunks, backward_chunks=backward)
    assert between_all_to_alls(plan) == []
    order = plan.schedule.lanes[Lane.INTER]
    for i, task in enumerate(order):
        if is_all_reduce(task):  # behind the next layer's all-to-alls, before those of the layer after it
            next_layer = task.layer - 1 if task.op == Op.ALL_REDUCE else task.layer
            assert not any(is_move_back(t, next_layer) for t in order[i:])
            for lower in range(next_layer):
                assert not any(is_move_back(t, lower) for t in order[:i])


@given(shapes(), seeds, degrees, degrees)
def test_fsmoe_reduces_a_layer_between_the_all_to_alls_of_the_next_moe_layer(
    shape: StepShape, seed: int, chunks: int, backward: int
) -> None:
    plan, _ = run("fsmoe", uncut(shape), seed, chunks=chunks, backward_chunks=backward)
    moe = [layer for layer, is_moe in enumerate(shape.moe_layers) if is_moe]
    reduced = [t for t in plan.graph.tasks if t.op == Op.ALL_REDUCE]
    below = {task: [layer for layer in moe if layer < task.layer] for task in reduced}
    expected = {(task, layers[-1]) for task, layers in below.items() if layers}
    assert {(t, layer) for t, layer in between_all_to_alls(plan) if t.op == Op.ALL_REDUCE} == expected
    last = [t for t in plan.schedule.lanes[Lane.INTER] if is_all_reduce(t)]
    tail = [t for t in last if t.op == Op.ALL_REDUCE and not below[t]]
    assert last[len(last) - len(tail) :] == tail


@st.composite
def partitions(draw: st.DrawFn, shape: StepShape) -> Partition:
    """Every layer's gradients in up to three portions in any gaps behind them."""
    portions = []
    for layer in range(shape.num_layers):
        slots = [TAIL] + [Slot(layer=lower, part="dense") for lower in range(layer)]
        slots += [Slot(layer=lower, part="moe") for lower in range(layer) if shape.moe_layers[lower]]
        one = st.builds(Portion, size_bytes=st.integers(1, 10**6), slot=st.sampled_from(slots))
        portions.append(tuple(draw(st.lists(one, max_size=3))))
    return Partition(tuple(portions))


@given(st.data(), shapes(), degrees, degrees)
def test_fsmoe_puts_every_portion_into_its_gap(
    data: st.DataObject, shape: StepShape, chunks: int, backward: int
) -> None:
    whole = uncut(shape)
    partition = data.draw(partitions(whole))
    plan = planned("fsmoe", whole, chunks=chunks, backward_chunks=backward, partition=partition)
    assert plan.shape.all_reduce_parts == partition.parts
    inside = between_all_to_alls(plan)
    for layer, portions in enumerate(partition.portions):
        for piece, portion in enumerate(portions):
            gaps = [q for t, q in inside if t.name == Name(layer, Op.ALL_REDUCE, B, piece=piece)]
            assert gaps == ([portion.slot.layer] if portion.slot.part == "moe" else [])


def test_a_gap_that_a_layer_does_not_have_is_refused() -> None:
    portion = Portion(size_bytes=1, slot=Slot(layer=0, part="moe"))
    shape = StepShape(moe_layers=(False, True))
    with pytest.raises(ScheduleError, match="layer 0 is dense: there is no gap between its all-to-alls"):
        planned("fsmoe", shape, partition=Partition(((), (portion,))))


# ---- flowmoe and lina --------------------------------------------------------------------------------------


@given(shapes(dense=False, plain=True), seeds, st.integers(1, 4))
def test_flowmoe_computes_and_exchanges_in_the_published_order(
    shape: StepShape, seed: int, microbatches: int
) -> None:
    """Eq. 2 and 3 forward, Eq. 4 and 5 backward; every op of all pieces before the next op."""
    plan, _ = run("flowmoe", uncut(shape), seed, microbatches=microbatches)
    up, down = range(microbatches), range(microbatches - 1, -1, -1)
    layers = range(shape.num_layers)

    def served(lane: Lane, phase: Phase, *ops: str) -> list[Name]:
        return [task.name for task in of_phase(plan.schedule.lanes[lane], phase) if task.op in ops]

    def forward(op: str, layer: int) -> list[Name]:
        return [Name(layer, op, F, m, 0 if op != Op.ATTENTION else None) for m in up]

    def backward(op: str, layer: int) -> list[Name]:
        return [Name(layer, op, B, m, 0 if op != Op.ATTENTION else None) for m in down]

    compute, exchange = (Op.ATTENTION, Op.EXPERTS), (Op.DISPATCH, Op.COMBINE)
    assert served(Lane.COMPUTE, F, *compute) == [t for n in layers for op in compute for t in forward(op, n)]
    assert served(Lane.INTER, F, *exchange) == [t for n in layers for op in exchange for t in forward(op, n)]
    assert served(Lane.COMPUTE, B, *compute) == [
        t for n in reversed(layers) for op in reversed(compute) for t in backward(op, n)
    ]
    assert served(Lane.INTER, B, *exchange) == [
        t for n in reversed(layers) for op in reversed(exchange) for t in backward(op, n)
    ]


@pytest.mark.parametrize("name", ["flowmoe", "lina"])
@given(shape=shapes(chunks=2), seed=seeds, microbatches=st.integers(1, 4))
def test_no_all_reduce_starts_while_an_all_to_all_is_ready(
    name: str, shape: StepShape, seed: int, microbatches: int
) -> None:
    plan, times = run(name, shape, seed, microbatches=microbatches)
    order = plan.schedule.lanes[Lane.INTER]
    for i, task in enumerate(order):
        if is_all_reduce(task):
            for other in order[i + 1 :]:
                assert is_all_reduce(other) or ready_s(other, plan.graph, times) > times[task][0]


@pytest.mark.parametrize("name", ["flowmoe", "lina"])
@given(shape=shapes(chunks=2), seed=seeds, microbatches=st.integers(1, 4))
def test_an_all_reduce_starts_as_soon_as_the_network_has_nothing_else(
    name: str, shape: StepShape, seed: int, microbatches: int
) -> None:
    plan, times = run(name, shape, seed, microbatches=microbatches)
    order, free_s = plan.schedule.lanes[Lane.INTER], 0.0
    ready = {task: ready_s(task, plan.graph, times) for task in order}
    for i, task in enumerate(order):
        if free_s < times[task][0]:
            assert all(ready[other] >= times[task][0] for other in order[i:] if is_all_reduce(other))
        free_s = times[task][1]


# ---- pieces ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**6)), st.integers(512, 10**5))
def test_as_many_pieces_as_it_takes_and_no_more(sizes: list[int], chunk: int) -> None:
    for size, pieces in zip(sizes, pieces_of(tuple(sizes), chunk), strict=True):
        assert (pieces - 1) * chunk < size <= pieces * chunk or pieces == size == 0
    assert whole(GradientBytes(tuple(sizes), ()))["replicated"] == tuple(int(size > 0) for size in sizes)
