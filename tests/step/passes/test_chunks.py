"""The rows of MoE layers in chunks, forward and backward apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Graph
from penstock.ops import Op
from penstock.step.passes import Chunks, Microbatches, Transpose
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import check_picture
from tests.step.support import names, reads
from tests.steps import task_at

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
