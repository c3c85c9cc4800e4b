"""The graph of an iteration: which tasks exist, and that backward mirrors forward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.graph import Graph, Lane, Name, Phase, ScheduleError
from penstock.mesh import Group
from penstock.ops import Kind, Op, spec_of
from penstock.ops.core import TRANSFERS, Hop
from penstock.step import Stage, StepShape
from tests.step.support import Rewriting, ancestors, needs
from tests.steps import shapes, task_at

F, B = Phase.FORWARD, Phase.BACKWARD
COMPUTING = {Op.EMBED, Op.ATTENTION, Op.SHARED, Op.EXPERTS, Op.UNPERMUTE, Op.HEAD}
INSIDE = {Op.DISPATCH_GATHER, Op.DISPATCH_SCATTER, Op.COMBINE_GATHER, Op.COMBINE_SCATTER}


def expected_names(shape: StepShape) -> Iterator[Name]:
    """Every task's name, written down in no order from what a step is."""
    legs = [op for hop in shape.dispatch for op in (hop.op, hop.home.op)]
    for m in range(shape.microbatches):
        for phase in (F, B):
            yield Name(0, Op.EMBED, phase, m)
            yield Name(shape.num_layers - 1, Op.HEAD, phase, m)
            for layer, is_moe in enumerate(shape.moe_layers):
                yield Name(layer, Op.ATTENTION, phase, m)
                if is_moe:
                    yield Name(layer, Op.UNPERMUTE, phase, m)
                    if shape.shared_experts:
                        yield Name(layer, Op.SHARED, phase, m)
                    for op in (*legs, Op.EXPERTS):
                        yield from (Name(layer, op, phase, m, c) for c in range(shape.degrees[phase is B]))
        if shape.exchange_counts:
            yield from (Name(layer, Op.COUNTS, F, m) for layer, moe in enumerate(shape.moe_layers) if moe)
    yield Name(shape.num_layers - 1, Op.STATISTICS, F)
    for layer, is_moe in enumerate(shape.moe_layers):
        yield from (Name(layer, Op.ALL_REDUCE, B, piece=c) for c in range(shape.pieces["replicated"][layer]))
        if is_moe:
            edp = range(shape.pieces["experts"][layer])
            yield from (Name(layer, Op.EXPERT_ALL_REDUCE, B, piece=c) for c in edp)


@given(shapes())
def test_every_task_stands_once(shape: StepShape) -> None:
    assert Counter(t.name for t in build_graph(shape).tasks) == Counter(expected_names(shape))


@given(shapes())
def test_only_the_first_tasks_wait_for_nothing_and_only_the_last_are_waited_for_by_nothing(
    shape: StepShape,
) -> None:
    graph = build_graph(shape)
    assert {t.op for t in graph.tasks if not graph.needs[t]} == {Op.EMBED}
    ends = {t.op for t in graph.tasks if not graph.readers[t]}
    assert ends <= {Op.ALL_REDUCE, Op.EXPERT_ALL_REDUCE, Op.EMBED}


@given(shapes())
def test_computing_is_done_alone_and_communicating_is_not(shape: StepShape) -> None:
    for each in build_graph(shape).tasks:
        other = Lane.INTRA if each.op in INSIDE else Lane.INTER
        assert each.lane is (Lane.COMPUTE if each.op in COMPUTING else other)
        assert each.meets == (spec_of(each.op).kind is Kind.COLLECTIVE) == (each.lane is not Lane.COMPUTE)


@given(shapes(), st.booleans())
def test_names_carry_the_indices_of_their_op(shape: StepShape, split_experts: bool) -> None:
    for each in build_graph(replace(shape, split_experts=split_experts)).tasks:
        indices = {"m": each.microbatch, "c": each.chunk, "p": each.piece}
        assert {letter for letter, index in indices.items() if index is not None} == set(
            spec_of(each.op).indices
        )


@given(shapes())
def test_legs_of_combine_meet_whom_those_of_dispatch_do(shape: StepShape) -> None:
    wanted = {op: (hop.axes, hop.lane) for hop in shape.dispatch for op in (hop.op, hop.home.op)}
    for each in build_graph(shape).tasks:
        if each.op in TRANSFERS:
            assert (each.axes, each.lane) == wanted[each.op]


@given(shapes())
def test_no_gradient_before_all_statistics(shape: StepShape) -> None:
    """Loss and balance terms are divided by sums over all microbatches and ranks."""
    graph = build_graph(shape)
    statistics = task_at(graph, f"L{shape.last}.ST.F")
    known = ancestors(graph, statistics)
    assert {t for t in graph.tasks if t.op in (Op.HEAD, Op.ATTENTION) and t.phase is F} <= known
    for each in graph.tasks:
        if each.phase is B:
            assert statistics in ancestors(graph, each)


def test_an_moe_layer_with_counts() -> None:
    graph = build_graph(StepShape(moe_layers=(True, True), microbatches=2, chunks=2))
    assert needs(graph, "L1.AT.m1.F") == {"L0.U.m1.F"}
    assert needs(graph, "L1.N.m1.F") == {"L1.AT.m1.F"}
    assert needs(graph, "L1.D.m1.c0.F") == {"L1.AT.m1.F", "L1.N.m1.F"}
    assert needs(graph, "L1.X.m1.c0.F") == {"L1.D.m1.c0.F", "L1.N.m1.F"}
    assert needs(graph, "L1.C.m1.c0.F") == {"L1.X.m1.c0.F", "L1.N.m1.F"}
    assert needs(graph, "L1.U.m1.F") == {"L1.AT.m1.F", "L1.C.m1.c0.F", "L1.C.m1.c1.F"}


def test_capacity_mode_has_no_counts_and_reads_the_sizes_from_the_attention() -> None:
    graph = build_graph(StepShape(moe_layers=(True,), exchange_counts=False))
    assert all(each.op != Op.COUNTS for each in graph.tasks)
    assert needs(graph, "L0.D.m0.c0.F") == {"L0.AT.m0.F"}
    assert needs(graph, "L0.X.m0.c0.F") == {"L0.D.m0.c0.F", "L0.AT.m0.F"}
    assert needs(graph, "L0.D.m0.c0.B") == {"L0.X.m0.c0.B", "L0.AT.m0.F"}


def test_parts_say_how_many_chunks_an_all_reduce_has() -> None:
    shape = StepShape(moe_layers=(True, True), all_reduce_parts=((5, 1, 2), ()))
    assert shape.pieces["replicated"] == (3, 0)
    assert (shape.parts_of(0), shape.parts_of(1)) == ((5, 1, 2), ())
    assert StepShape(moe_layers=(True,), pieces={"replicated": (3,)}).parts_of(0) == (1, 1, 1)


def test_shared_experts_wait_for_no_transfer() -> None:
    graph = build_graph(StepShape(moe_layers=(True,), shared_experts=True))
    assert needs(graph, "L0.S.m0.F") == {"L0.AT.m0.F"}
    assert "L0.S.m0.F" in needs(graph, "L0.U.m0.F")
    assert needs(graph, "L0.S.m0.B") == {"L0.S.m0.F", "L0.U.m0.B"}
    assert "L0.S.m0.B" in needs(graph, "L0.AT.m0.B")
    assert not any(t.lane is not Lane.COMPUTE for t in graph.readers[task_at(graph, "L0.S.m0.F")])


@pytest.mark.parametrize("legs", [(), ("C",), ("X",), ("DG", "DS"), ("D", "D"), ("DG", "DG", "D")])
def test_legs_that_are_none(legs: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError, match="the legs of a dispatch are DG, D, DS"):
        StepShape(moe_layers=(True,), dispatch=tuple(Hop(op, Group.EXPERT) for op in legs))


def test_first_and_last_layer() -> None:
    graph = build_graph(StepShape(moe_layers=(True, True), microbatches=2))
    assert needs(graph, "L0.AT.m1.F") == {"L0.EM.m1.F"}
    assert needs(graph, "L1.HD.m1.F") == {"L1.U.m1.F"}
    assert needs(graph, "L1.HD.m1.B") == {"L1.HD.m1.F", "L1.ST.F"}
    assert needs(graph, "L1.U.m1.B") == {"L1.U.m1.F", "L1.HD.m1.B"}
    assert needs(graph, "L0.U.m1.B") == {"L0.U.m1.F", "L1.AT.m1.B"}
    assert needs(graph, "L1.AR.p0.B") == {"L1.AT.m0.B", "L1.AT.m1.B"}
    assert needs(graph, "L0.AR.p0.B") == {"L0.EM.m0.B", "L0.EM.m1.B"}  # behind AT, which adds, too


def test_a_dense_block_is_its_attention_alone() -> None:
    graph = build_graph(StepShape(moe_layers=(True, False, False)))
    assert [str(t) for t in graph.tasks if t.layer == 1] == ["L1.AT.m0.F", "L1.AT.m0.B", "L1.AR.p0.B"]
    assert needs(graph, "L1.AT.m0.F") == {"L0.U.m0.F"}
    assert needs(graph, "L2.AT.m0.F") == {"L1.AT.m0.F"}
    assert needs(graph, "L2.HD.m0.F") == {"L2.AT.m0.F"}
    assert needs(graph, "L2.AT.m0.B") == {"L2.AT.m0.F", "L2.HD.m0.B"}
    assert needs(graph, "L0.U.m0.B") == {"L0.U.m0.F", "L1.AT.m0.B"}
    assert needs(graph, "L2.ST.F") == {"L0.AT.m0.F", "L2.HD.m0.F"}


def test_without_a_word_about_it_a_layer_has_one_all_reduce_and_no_expert_replicas() -> None:
    shape = StepShape(moe_layers=(True, False))
    assert (shape.pieces["replicated"], shape.pieces["experts"]) == ((1, 1), (0, 0))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"moe_layers": ()}, "at least one layer"),
        ({"microbatches": 0}, "at least one layer, one microbatch"),
        ({"chunks": 0}, "one chunk"),
        ({"pieces": {"replicated": (1,)}}, r"replicated gradients: one number per layer \(2\)"),
        ({"pieces": {"experts": (1, 1, 1)}}, "experts gradients: one number"),
    ],
)
def test_a_shape_that_is_no_step_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        StepShape(**{"moe_layers": (True, True), **changes})


WRONG: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "twice": (
        lambda graph: Graph.of([*graph.tasks, graph.tasks[0]]),
        "pass wrong: two tasks are called L0.EM.m0.F",
    ),
    "missing": (
        lambda graph: Graph(graph.tasks[1:]),
        "L0.AT.m0.F reads hidden of L0.EM.m0.F, which is not in the graph",
    ),
    "early": (
        lambda graph: Graph((graph.tasks[1], graph.tasks[0], *graph.tasks[2:])),
        "L0.AT.m0.F reads hidden of L0.EM.m0.F, which comes after it",
    ),
}
"""What a pass may do wrong, and what is said of it."""


@pytest.mark.parametrize("wrong", WRONG)
def test_a_pass_that_leaves_a_wrong_graph_is_found_when_it_is_built(wrong: str) -> None:
    rewrite, why = WRONG[wrong]
    more = (Rewriting("wrong", Stage.SETTLE, rewrite),)
    with pytest.raises(ScheduleError, match=re.escape(why)):
        build_graph(StepShape(moe_layers=(False,), more=more))
