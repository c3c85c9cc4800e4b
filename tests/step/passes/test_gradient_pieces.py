"""Pieces of gradient buffers: how many there are, how large, and what they wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.graph import Graph, Lane
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.core import summed
from penstock.schedule import SCHEDULES, unit_cost
from penstock.step import StepShape
from penstock.step.passes import (
    Chunks,
    GatheredLoads,
    GradientPieces,
    Microbatches,
    Transpose,
    WeightGradients,
    reductions,
)
from penstock.step.plain import PlainStep
from penstock.timing import iteration_s
from tests.step.passes.pictures import check_picture
from tests.step.support import ancestors, names, reads
from tests.steps import SHARED, gradients_of, shapes, task_at
from tests.support.draws import draws


def whole(*moe_layers: bool, microbatches: int = 1, shared_experts: bool = False) -> Graph:
    plain = PlainStep(moe_layers=moe_layers, shared_experts=shared_experts).graph()
    return Microbatches(microbatches)(Transpose()(plain))


def test_the_picture_is_true() -> None:
    graph = whole(True, True, microbatches=2)
    pieces = GradientPieces({"replicated": [(), (1, 1)], "experts": [(), (1,)]})
    check_picture(
        GradientPieces,
        graph,
        pieces(graph),
        layer=1,
    )


def test_pieces_know_their_buffer_their_size_and_whom_they_meet() -> None:
    graph = GradientPieces({"replicated": [(5, 1, 2)], "experts": [(1, 1)]})(whole(True)).check()
    pieces = [task for task in graph.tasks if summed(task.op)]
    assert [str(task) for task in pieces] == [
        "L0.XR.p0.B", "L0.XR.p1.B", "L0.AR.p0.B", "L0.AR.p1.B", "L0.AR.p2.B",
    ]  # fmt: skip
    assert {(t.op, t.axes, t.reads, t.cut.parts, t.lane) for t in pieces} == {
        ("AR", Group.WORLD, ("gradients of L0",), (5, 1, 2), Lane.INTER),
        ("XR", Group.EXPERT_DATA, ("expert gradients of L0",), (1, 1), Lane.INTER),
    }


@draws(40)
@given(shapes(layers=2), st.booleans())
def test_a_piece_waits_for_all_that_add_and_for_no_one_twice(shape: StepShape, split_experts: bool) -> None:
    graph = build_graph(replace(shape, split_experts=split_experts))
    for task in graph.tasks:
        for state in task.writes:
            adding = {t for t in graph.tasks if state in t.accumulates}
            assert adding and adding <= ancestors(graph, task)
            needs = graph.needs[task]
            assert set(needs) <= adding
            assert not any(set(needs) & ancestors(graph, need) for need in needs)


def test_nothing_is_reduced_where_nothing_adds_or_nothing_is_asked_for() -> None:
    """A dense layer has no experts; without replicas nobody asks for their sums."""
    graph = GradientPieces({"replicated": [(), (1,)], "experts": [(), (1, 1)]})(whole(True, False)).check()
    assert [name for name in names(graph) if summed(task_at(graph, name).op)] == ["L1.AR.p0.B"]


def test_pieces_that_are_only_priced_read_nothing() -> None:
    made = reductions(3, {"replicated": (1, 2), "experts": (1,)})
    replicated, experts = made["replicated"], made["experts"]
    assert list(map(str, [*replicated, *experts])) == ["L3.AR.p0.B", "L3.AR.p1.B", "L3.XR.p0.B"]
    assert all(task.inputs == {} for task in [*replicated, *experts])
    assert [task.cut.parts for task in replicated] == [(1, 2), (1, 2)]


# ---- weight gradients --------------------------------------------------------------------------------------


def derived(*moe_layers: bool) -> Graph:
    return Transpose()(PlainStep(moe_layers=moe_layers).graph())


def test_the_picture_of_weight_gradients_is_true() -> None:
    graph = derived(True, True)
    check_picture(WeightGradients, graph, WeightGradients()(graph), layer=1)


def test_the_weights_are_what_is_added_to_the_buffer() -> None:
    graph = GradientPieces({"replicated": [(1,)], "experts": [(1,)]})(
        WeightGradients()(derived(True))
    ).check()
    assert task_at(graph, "L0.X.m0.c0.I").accumulates == ()
    assert task_at(graph, "L0.X.m0.c0.W").accumulates == ("expert gradients of L0",)
    assert reads(graph, "L0.XR.p0.B") == {"gradients": "L0.X.m0.c0.W"}


def test_every_chunk_leaves_its_own_weights_at_the_end_of_the_layer() -> None:
    graph = WeightGradients()(Chunks(2, 2)(derived(True, True))).check()
    assert names(graph)[-2:] == ["L0.X.m0.c0.W", "L0.X.m0.c1.W"]
    assert reads(graph, "L1.X.m0.c1.W") == {"left": "L1.X.m0.c1.I"}
    assert task_at(graph, "L1.X.m0.c1.W").cut == task_at(graph, "L1.X.m0.c1.I").cut
    place = {name: i for i, name in enumerate(names(graph))}
    assert place["L1.AT.m0.B"] < place["L1.X.m0.c0.W"] < place["L0.U.m0.B"]


def test_a_dense_step_stays_as_it_is() -> None:
    assert WeightGradients()(derived(False)) == derived(False)


# ---- gathered loads ----------------------------------------------------------------------------------------


def test_the_picture_of_loads_is_true() -> None:
    graph = Microbatches(2)(Transpose()(PlainStep(moe_layers=(False, True)).graph()))
    check_picture(GatheredLoads, graph, GatheredLoads()(graph), layer=1)


def test_it_reads_every_gate_whatever_task_has_it() -> None:
    shape = StepShape(moe_layers=(True, False, True), microbatches=2, sharing=SHARED, gathers_loads=True)
    task = task_at(build_graph(shape), "L2.LG.B")
    gates = ["L0.GT.m0.F", "L0.GT.m1.F", "L2.GT.m0.F", "L2.GT.m1.F"]
    assert [str(name) for name in task.inputs["routers"]] == gates
    assert (task.lane, task.axes) == (Lane.INTER, Group.WORLD)


@draws(40)
@given(shapes())
def test_nothing_waits_for_it_and_a_model_without_gates_has_none(shape: StepShape) -> None:
    with_loads, without = (build_graph(replace(shape, gathers_loads=on)) for on in (True, False))
    added = [task for task in with_loads.tasks if task not in set(without.tasks)]
    assert [task.op for task in added] == [Op.LOADS] * any(shape.moe_layers)
    assert [task for task in with_loads.tasks if task not in set(added)] == list(without.tasks)
    for task in added:
        assert not with_loads.readers[task]
        assert task_at(with_loads, f"L{shape.last}.ST.F") in ancestors(with_loads, task)


@pytest.mark.slow
def test_schedules_put_it_where_it_holds_nothing_up() -> None:
    """One slot of the network under the backward of the head and what follows it."""
    base = StepShape(moe_layers=(True, True))
    for name, system in SCHEDULES.items():
        found = []
        for on in (True, False):
            choice = Decision(schedule=name, microbatches=2)
            shape = system.shape(replace(base, gathers_loads=on), choice, gradients_of(base))
            graph = build_graph(shape)
            found.append(iteration_s(system.order(graph, unit_cost, choice), graph, unit_cost))
        assert found[0] == found[1], name
