"""The rows of MoE layers in chunks, forward and backward apart."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Graph, Name
from penstock.ops import Op
from penstock.step import StepShape
from penstock.step.passes import Chunks, Microbatches, Settle, Transpose
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import check_picture
from tests.step.support import names, reads
from tests.steps import shapes, task_at

numbers = st.integers(1, 6)


def whole(*moe_layers: bool) -> Graph:
    return Transpose()(PlainStep(moe_layers=moe_layers, exchange_counts=False).graph())


def test_the_picture_is_true() -> None:
    graph = whole(True, True)
    check_picture(Chunks, graph, Chunks(2, 2)(graph), layer=1)


def test_only_what_travels_and_experts_are_cut() -> None:
    graph = Chunks(2, 3)(whole(True))
    chunks = {(t.op, t.phase): 0 for t in graph.tasks if t.chunk is not None}
    for t in graph.tasks:
        if t.chunk is not None:
            chunks[t.op, t.phase] += 1
    assert {op for op, _ in chunks} == {Op.DISPATCH, Op.EXPERTS, Op.COMBINE}
    assert all(count == (2 if phase == "F" else 3) for (_, phase), count in chunks.items())
    assert len(names(graph)) == 5 + 3 * 2 + 4 + 3 * 3


@given(numbers, numbers)
def test_chunks_of_both_phases_are_runs_of_the_same_slices(forward: int, backward: int) -> None:
    graph = Chunks(forward, backward)(whole(True)).check()
    for phase in "FB":
        held = [t.cut for t in graph.tasks if t.op == Op.EXPERTS and t.phase == phase]
        assert {cut.slices for cut in held} == {held[0].slices}
        assert [s for cut in held for s in cut.held] == list(range(held[0].slices))
    assert held[0].slices % forward == held[0].slices % backward == 0


@given(numbers, numbers)
def test_a_backward_chunk_reads_the_forward_chunks_that_hold_its_slices(forward: int, backward: int) -> None:
    graph = Chunks(forward, backward)(whole(True))
    for task in graph.tasks:
        if task.op == Op.EXPERTS and not task.forward:
            saved = [graph.by_name[name] for name in task.inputs["saved"]]
            assert set(task.cut.held) <= {s for each in saved for s in each.cut.held}
            assert all(set(task.cut.held) & set(each.cut.held) for each in saved)
            assert [str(name) for name in task.inputs["d_rows"]] == [f"L0.C.m0.c{task.chunk}.B"]


def test_what_is_not_cut_has_all_slices_of_its_layer_and_a_dense_layer_one() -> None:
    graph = Chunks(2, 3)(whole(True, False))
    assert task_at(graph, "L0.AT.m0.F").cut.slices == 6
    assert list(task_at(graph, "L0.U.m0.B").cut.held) == list(range(6))
    assert task_at(graph, "L1.AT.m0.F").cut.slices == 1
    assert reads(graph, "L0.U.m0.F")["rows"] == "L0.C.m0.c0.F L0.C.m0.c1.F"
    assert reads(graph, "L0.AT.m0.B")["d_rows"] == "L0.D.m0.c0.B L0.D.m0.c1.B L0.D.m0.c2.B"


@pytest.mark.parametrize("count", [1, 3])
def test_microbatches_keep_their_chunks_to_themselves(count: int) -> None:
    graph = Chunks(2, 2)(Microbatches(count)(whole(True))).check()
    for m in range(count):
        assert reads(graph, f"L0.X.m{m}.c1.F")["rows"] == f"L0.D.m{m}.c1.F"
        assert task_at(graph, f"L0.X.m{m}.c1.F").cut.microbatches == count


# ---- settling ----------------------------------------------------------------------------------------------


SHAPE = StepShape(
    moe_layers=(True,),
    microbatches=2,
    chunks=2,
    dispatch=DISPATCHES["hierarchical_2d"].hops,
    shared_experts=True,
    split_experts=True,
    pieces={"replicated": (2,), "experts": (1,)},
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


# ---- microbatches ------------------------------------------------------------------------------------------


PLAIN = PlainStep(moe_layers=(True, False)).graph()


def test_the_picture_of_microbatches_is_true() -> None:
    graph = PlainStep(moe_layers=(True,)).graph()
    check_picture(Microbatches, graph, Microbatches(2)(graph), layer=0)


def test_the_statistics_read_every_microbatch_and_every_backward_reads_them() -> None:
    graph = Microbatches(3)(Transpose()(PLAIN)).check()
    assert reads(graph, "L1.ST.F") == {
        "loss": "L1.HD.m0.F L1.HD.m1.F L1.HD.m2.F",
        "routers": "L0.AT.m0.F L0.AT.m1.F L0.AT.m2.F",
    }
    assert all(reads(graph, f"L1.HD.m{m}.B")["d_loss"] == "L1.ST.F" for m in range(3))
    assert names(graph).count("L1.ST.F") == 1


@given(st.integers(1, 5))
def test_every_microbatch_is_the_whole_step_again(count: int) -> None:
    """Apart from sums over the batch, no task of one reads one of another."""
    whole = Transpose()(PLAIN)
    graph = Microbatches(count)(whole).check()
    for m in range(count):
        mine = [task for task in graph.tasks if task.microbatch == m]
        assert [t.name._replace(microbatch=0) for t in mine] == [
            t.name for t in whole.tasks if t.microbatch is not None
        ]
        for task in mine:
            original = whole.by_name[task.name._replace(microbatch=0)]
            assert (task.lane, task.axes, task.accumulates) == (
                original.lane,
                original.axes,
                original.accumulates,
            )
            assert task.inputs == {
                role: tuple(_moved(name, m) for name in read) for role, read in original.inputs.items()
            }


def _moved(name: Name, microbatch: int) -> Name:
    return name if name.microbatch is None else name._replace(microbatch=microbatch)


def test_a_task_knows_into_how_many_the_batch_is_cut() -> None:
    graph = Microbatches(3)(PLAIN)
    assert {task.cut.microbatches for task in graph.tasks if task.microbatch is not None} == {3}
    assert task_at(graph, "L1.ST.F").cut.microbatches == 1
