"""Pieces of gradient buffers: how many there are, how large, and what they wait for."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.graph import Graph, Lane
from penstock.mesh import Group
from penstock.ops.gradients import summed
from penstock.step import StepShape
from penstock.step.passes import GradientPieces, Microbatches, Transpose, reductions
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import check_picture
from tests.step.support import ancestors, names, reads
from tests.steps import shapes, task_at
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


def test_a_piece_reads_the_last_that_add_and_stands_behind_the_others() -> None:
    """In the first layer the embedding adds behind attention; shared experts and U add before it."""
    graph = GradientPieces({"replicated": [(1,), (1,)], "experts": [(1,), (1,)]})(
        whole(True, True, microbatches=2, shared_experts=True)
    ).check()
    assert reads(graph, "L0.AR.p0.B") == {"gradients": "L0.EM.m0.B L0.EM.m1.B"}
    assert reads(graph, "L1.AR.p0.B") == {"gradients": "L1.AT.m0.B L1.AT.m1.B"}
    assert reads(graph, "L1.XR.p0.B") == {"gradients": "L1.X.m0.c0.B L1.X.m1.c0.B"}


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
