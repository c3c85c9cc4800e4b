"""Program order: breadth first, with a rank's own work before what it waits for."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Graph
from penstock.step import StepShape
from penstock.step.passes import Settle
from tests.step.support import names
from tests.steps import shapes

SHAPE = StepShape(
    moe_layers=(True,),
    microbatches=2,
    chunks=2,
    dispatch=DISPATCHES["hierarchical_2d"].hops,
    shared_experts=True,
    split_experts=True,
    all_reduce_chunks=(2,),
    expert_all_reduce_chunks=(1,),
)
WRITTEN_OUT = """
    EM.m0.F EM.m1.F AT.m0.F AT.m1.F
    N.m0.F DG.m0.c0.F DG.m0.c1.F D.m0.c0.F D.m0.c1.F N.m1.F DG.m1.c0.F DG.m1.c1.F D.m1.c0.F D.m1.c1.F
    S.m0.F S.m1.F X.m0.c0.F X.m0.c1.F X.m1.c0.F X.m1.c1.F
    C.m0.c0.F C.m0.c1.F C.m1.c0.F C.m1.c1.F CS.m0.c0.F CS.m0.c1.F CS.m1.c0.F CS.m1.c1.F
    U.m0.F U.m1.F HD.m0.F HD.m1.F ST.F
    HD.m1.B HD.m0.B U.m1.B U.m0.B
    CS.m1.c0.B CS.m1.c1.B CS.m0.c0.B CS.m0.c1.B C.m1.c0.B C.m1.c1.B C.m0.c0.B C.m0.c1.B
    S.m1.B S.m0.B X.m1.c0.I X.m1.c1.I X.m0.c0.I X.m0.c1.I
    D.m1.c0.B D.m1.c1.B D.m0.c0.B D.m0.c1.B DG.m1.c0.B DG.m1.c1.B DG.m0.c0.B DG.m0.c1.B
    AT.m1.B AT.m0.B EM.m1.B EM.m0.B
    X.m1.c0.W X.m1.c1.W X.m0.c0.W X.m0.c1.W XR.p0.B AR.p0.B AR.p1.B
"""


def test_a_step_written_out() -> None:
    assert names(build_graph(SHAPE)) == [f"L0.{name}" for name in WRITTEN_OUT.split()]


@given(shapes())
def test_nothing_is_lost_and_what_is_settled_stays(shape: StepShape) -> None:
    graph = build_graph(shape)
    assert Settle()(graph) == graph
    scattered = Graph.of(reversed(graph.tasks))
    assert Counter(Settle()(scattered).tasks) == Counter(graph.tasks)


@given(shapes())
def test_microbatches_go_up_forward_and_down_backward(shape: StepShape) -> None:
    graph = build_graph(shape)
    for forward in (True, False):
        for op in {task.op for task in graph.tasks}:
            for layer in range(shape.num_layers):
                tasks = [t for t in graph.tasks if (t.op, t.layer, t.forward) == (op, layer, forward)]
                turns = [((t.microbatch or 0) * (1 if forward else -1), t.chunk or 0) for t in tasks]
                assert turns == sorted(turns)


@given(shapes())
def test_shared_experts_stand_before_the_routed_ones(shape: StepShape) -> None:
    graph = build_graph(shape)
    place = graph.position
    for task in graph.tasks:
        if task.op == "S":
            experts = [
                t for t in graph.tasks if (t.op, t.layer, t.forward) == ("X", task.layer, task.forward)
            ]
            assert all(place[task] < place[expert] for expert in experts)
