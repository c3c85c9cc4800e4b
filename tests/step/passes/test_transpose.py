"""The backward half: every differentiable edge turned round, whatever the forward half looks like."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Cut, Graph, Lane, Name, ScheduleError, Task
from penstock.mesh import Group
from penstock.ops import OPS, Backward, Kind, Op, OpSpec, register, spec_of
from penstock.step.passes import Transpose
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import check_picture
from tests.step.support import names, reads
from tests.steps import no_work, task_at

PLAIN = PlainStep(moe_layers=(True, True), shared_experts=True).graph()
WHOLE = Transpose()(PLAIN)


@pytest.fixture
def own_ops() -> Iterator[None]:
    """Ops of a test, which leave no trace."""
    before = dict(OPS)
    register(
        OpSpec(name="Q", title="quantise", kind=Kind.COPY, work=no_work, given=frozenset({"scale"})),
        OpSpec(
            name="P",
            title="a pass of rows round a ring",
            kind=Kind.COLLECTIVE,
            work=no_work,
            transpose="P",
            given=frozenset({"to"}),
        ),
        OpSpec(name="SO", title="solve", kind=Kind.HOST, work=no_work, backward=Backward.NONE),
    )
    yield
    OPS.clear()
    OPS.update(before)


def task(text: str, **inputs: str) -> Task:
    read = {role: tuple(map(Name.parse, found.split())) for role, found in inputs.items()}
    return Task(Name.parse(text), Lane.COMPUTE, (), read)


def test_the_picture_is_true() -> None:
    check_picture(Transpose, PLAIN, WHOLE, layer=1)


def test_the_forward_half_stays_as_it_is_and_the_backward_half_is_its_mirror() -> None:
    half = len(PLAIN.tasks)
    assert WHOLE.tasks[:half] == PLAIN.tasks
    assert names(WHOLE)[half:] == [
        str(t.name.back) for t in reversed(PLAIN.tasks) if t.op not in (Op.STATISTICS, Op.COUNTS)
    ]
    WHOLE.check()


def test_several_gradients_of_one_output_are_all_read_in_program_order() -> None:
    """Two blocks that read the same hidden states: their gradients are added where those were made."""
    graph = Graph.of(
        [
            task("L0.EM.m0.F"),
            task("L0.AT.m0.F", hidden="L0.EM.m0.F"),
            task("L1.AT.m0.F", hidden="L0.EM.m0.F"),
            task("L1.HD.m0.F", hidden="L0.AT.m0.F L1.AT.m0.F"),
        ]
    )
    found = Transpose()(graph).check()
    assert reads(found, "L0.EM.m0.B") == {"d_hidden": "L0.AT.m0.B L1.AT.m0.B", "saved": "L0.EM.m0.F"}
    assert reads(found, "L1.AT.m0.B") == {"d_hidden": "L1.HD.m0.B", "saved": "L1.AT.m0.F"}


@pytest.mark.usefixtures("own_ops")
def test_ops_that_somebody_registered_follow_the_same_rules() -> None:
    graph = Graph.of(
        [
            task("L0.AT.m0.F"),
            task("L0.SO.m0.F", rows="L0.AT.m0.F"),
            task("L0.Q.m0.F", rows="L0.AT.m0.F", scale="L0.SO.m0.F"),
            task("L0.P.m0.F", rows="L0.Q.m0.F", to="L0.SO.m0.F"),
        ]
    )
    found = Transpose()(graph).check()
    assert names(found)[4:] == ["L0.P.m0.B", "L0.Q.m0.B", "L0.AT.m0.B"]
    assert reads(found, "L0.P.m0.B") == {"to": "L0.SO.m0.F"}
    assert reads(found, "L0.Q.m0.B") == {"d_rows": "L0.P.m0.B", "saved": "L0.Q.m0.F"}
    assert reads(found, "L0.AT.m0.B") == {"d_rows": "L0.Q.m0.B", "saved": "L0.AT.m0.F"}


def test_an_op_that_nobody_registered_is_named() -> None:
    with pytest.raises(ScheduleError, match="no op is called QQ"):
        Transpose()(Graph.of([task("L0.QQ.m0.F")]))


def test_lane_group_and_cut_are_those_of_the_forward_task() -> None:
    there = Task(Name.parse("L0.D.m0.c1.F"), Lane.INTRA, Group.RAIL, {}, Cut(slices=2, first=1, stop=2))
    (back,) = Transpose()(Graph.of([there])).tasks[1:]
    assert (back.lane, back.axes, back.cut) == (Lane.INTRA, Group.RAIL, there.cut)


def test_the_backward_says_which_gradients_it_adds_to() -> None:
    added = {str(t): t.accumulates for t in WHOLE.tasks if t.accumulates}
    assert added["L1.X.m0.c0.B"] == ("expert gradients of L1",)
    replicated = {"HD": 1, "AT": 1, "U": 1, "S": 1}
    assert {op: added[f"L{layer}.{op}.m0.B"] for op, layer in replicated.items()} == dict.fromkeys(
        replicated, ("gradients of L1",)
    )
    assert added["L0.EM.m0.B"] == ("gradients of L0",)
    assert all(name.endswith(".B") for name in added)


@given(st.lists(st.booleans(), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_every_differentiable_edge_is_turned_round_and_no_other(
    moe_layers: list[bool], exchange_counts: bool, shared_experts: bool
) -> None:
    """Edge by edge: reader.F reads `r` of a task exactly if that task's B reads `d_r` of reader.B."""
    plain = PlainStep(
        moe_layers=tuple(moe_layers), exchange_counts=exchange_counts, shared_experts=shared_experts
    ).graph()
    graph = Transpose()(plain).check()
    forward = {
        (name.back, f"d_{role}", reader.name if spec.backward is Backward.VALUE else reader.name.back)
        for reader in plain.tasks
        if (spec := spec_of(reader.op)).backward is not Backward.NONE
        for role, read in reader.inputs.items()
        if role not in spec.given
        for name in read
        if spec_of(name.op).backward is Backward.TASK
    }
    backward = {
        (each.name, role, name)
        for each in graph.tasks
        if not each.forward
        for role, read in each.inputs.items()
        if role.startswith("d_")
        for name in read
    }
    assert backward == forward
    for each in graph.tasks:
        if not each.forward:
            saves = spec_of(each.op).saves
            assert ("saved" in each.inputs) == saves
            assert not saves or task_at(graph, str(each.inputs["saved"][0])) in plain.tasks
