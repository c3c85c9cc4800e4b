"""Experts' backward in two tasks: who reads which, and where the gradients are added."""

from __future__ import annotations

from penstock.graph import Graph
from penstock.step.passes import Chunks, GradientPieces, Transpose, WeightGradients
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import check_picture
from tests.step.support import names, reads
from tests.steps import task_at


def whole(*moe_layers: bool) -> Graph:
    return Transpose()(PlainStep(moe_layers=moe_layers).graph())


def test_the_picture_is_true() -> None:
    graph = whole(True, True)
    check_picture(WeightGradients, graph, WeightGradients()(graph), layer=1)


def test_the_wire_waits_for_input_gradients_only() -> None:
    graph = WeightGradients()(whole(True)).check()
    assert reads(graph, "L0.X.m0.c0.I") == {"d_rows": "L0.C.m0.c0.B", "saved": "L0.X.m0.c0.F"}
    assert reads(graph, "L0.D.m0.c0.B")["d_rows"] == "L0.X.m0.c0.I"
    assert reads(graph, "L0.X.m0.c0.W") == {"left": "L0.X.m0.c0.I"}
    assert graph.readers[task_at(graph, "L0.X.m0.c0.W")] == ()
    assert "L0.X.m0.c0.B" not in names(graph)


def test_the_weights_are_what_is_added_to_the_buffer() -> None:
    graph = GradientPieces({"replicated": [(1,)], "experts": [(1,)]})(WeightGradients()(whole(True))).check()
    assert task_at(graph, "L0.X.m0.c0.I").accumulates == ()
    assert task_at(graph, "L0.X.m0.c0.W").accumulates == ("expert gradients of L0",)
    assert reads(graph, "L0.XR.p0.B") == {"gradients": "L0.X.m0.c0.W"}


def test_every_chunk_leaves_its_own_weights_at_the_end_of_the_layer() -> None:
    graph = WeightGradients()(Chunks(2, 2)(whole(True, True))).check()
    assert names(graph)[-2:] == ["L0.X.m0.c0.W", "L0.X.m0.c1.W"]
    assert reads(graph, "L1.X.m0.c1.W") == {"left": "L1.X.m0.c1.I"}
    assert task_at(graph, "L1.X.m0.c1.W").cut == task_at(graph, "L1.X.m0.c1.I").cut
    place = {name: i for i, name in enumerate(names(graph))}
    assert place["L1.AT.m0.B"] < place["L1.X.m0.c0.W"] < place["L0.U.m0.B"]


def test_a_dense_step_stays_as_it_is() -> None:
    assert WeightGradients()(whole(False)) == whole(False)
