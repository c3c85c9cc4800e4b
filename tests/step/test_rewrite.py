"""The tools of passes: tasks put on edges and behind others, tasks cut into pieces, ends of layers."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Cut, Graph, Lane, Name, ScheduleError, Task
from penstock.step.plain import PlainStep
from penstock.step.rewrite import Axis, Names, end_layers, insert_after, insert_before, split
from tests.step.support import names, reads
from tests.steps import task_at

PLAIN = PlainStep(moe_layers=(True,), exchange_counts=False).graph()
"""EM, AT, D, X, C, U, HD, ST of one MoE layer."""


# ---- insertion ---------------------------------------------------------------------------------------------


def before_reader(task: Task, read: Names) -> Task:
    return Task(task.name._replace(op="Q"), Lane.COMPUTE, (), {"raw": read})


def after_task(task: Task) -> Task:
    return Task(task.name._replace(op="Q"), Lane.COMPUTE, (), {"raw": (task.name,)})


def test_a_task_before_another_stands_on_one_of_its_edges() -> None:
    graph = insert_before(PLAIN, "C", "rows", before_reader).check()
    assert names(graph)[3:6] == ["L0.X.m0.c0.F", "L0.Q.m0.c0.F", "L0.C.m0.c0.F"]
    assert reads(graph, "L0.Q.m0.c0.F") == {"raw": "L0.X.m0.c0.F"}
    assert reads(graph, "L0.C.m0.c0.F") == {"rows": "L0.Q.m0.c0.F", "route": "L0.AT.m0.F"}


def test_a_task_after_another_stands_on_all_edges_of_one_output() -> None:
    graph = insert_after(PLAIN, "AT", "rows", after_task).check()
    assert names(graph)[1:4] == ["L0.AT.m0.F", "L0.Q.m0.F", "L0.D.m0.c0.F"]
    assert reads(graph, "L0.Q.m0.F") == {"raw": "L0.AT.m0.F"}
    assert reads(graph, "L0.D.m0.c0.F") == {"rows": "L0.Q.m0.F", "route": "L0.AT.m0.F"}
    assert reads(graph, "L0.U.m0.F")["residual"] == "L0.AT.m0.F", "another output is left alone"


def test_an_insertion_that_fits_nowhere_is_refused() -> None:
    for insert in (
        lambda: insert_before(PLAIN, "N", "rows", before_reader),
        lambda: insert_after(PLAIN, "N", "rows", after_task),
    ):
        with pytest.raises(ScheduleError, match=r"^the step has no task N$"):
            insert()
    why = re.escape("L0.D.m0.c0.F has no input hidden; it reads rows, route")
    with pytest.raises(ScheduleError, match=f"^{why}$"):
        insert_before(PLAIN, "D", "hidden", before_reader)


# ---- cutting -----------------------------------------------------------------------------------------------


def chain(first: int, second: int, read: str = "L0.D.m0.c0.F") -> Graph:
    """D, which X reads, cut into so many pieces each; 0 = not cut."""
    tasks = [
        Task(Name.parse("L0.D.m0.c0.F"), Lane.INTER),
        Task(Name.parse("L0.X.m0.c0.F"), Lane.COMPUTE, (), {"rows": (Name.parse(read),)}),
    ]
    counts = {"D": first, "X": second}
    return split(
        Graph.of(tasks), "chunk", lambda t: counts[t.op], lambda t, i: Cut(first=i, stop=i + 1, slices=9)
    )


@given(st.integers(1, 12), st.integers(1, 12))
def test_pieces_meet_exactly_where_they_overlap(first: int, second: int) -> None:
    graph = chain(first, second).check()
    for i in range(second):
        read = task_at(graph, f"L0.X.m0.c{i}.F").inputs["rows"]
        mine = Fraction(i, second), Fraction(i + 1, second)
        assert [name.chunk for name in read] == [
            j for j in range(first) if Fraction(j, first) < mine[1] and mine[0] < Fraction(j + 1, first)
        ]


def test_what_is_not_cut_meets_every_piece() -> None:
    assert reads(chain(3, 0), "L0.X.m0.c0.F") == {"rows": "L0.D.m0.c0.F L0.D.m0.c1.F L0.D.m0.c2.F"}
    graph = chain(0, 3)
    assert [reads(graph, f"L0.X.m0.c{i}.F")["rows"] for i in range(3)] == ["L0.D.m0.c0.F"] * 3


def test_every_piece_gets_its_own_cut_and_keeps_the_other_facts() -> None:
    task = Task(
        Name.parse("L0.X.m0.c0.B"), Lane.COMPUTE, ("ep",), {}, accumulates=("sums",), reads=("others",)
    )
    graph = split(Graph.of([task]), "chunk", lambda _: 2, lambda _, i: Cut(slices=2, first=i, stop=i + 1))
    assert [(str(t), t.cut.held) for t in graph.tasks] == [
        ("L0.X.m0.c0.B", range(1)),
        ("L0.X.m0.c1.B", range(1, 2)),
    ]
    for piece in graph.tasks:
        assert (piece.lane, piece.axes) == (Lane.COMPUTE, ("ep",))
        assert (piece.accumulates, piece.reads) == (("sums",), ("others",))


AXES: list[tuple[Axis, str]] = [("microbatch", "m"), ("chunk", "c"), ("piece", "p")]


@pytest.mark.parametrize(("axis", "letter"), AXES)
def test_each_axis_has_its_index(axis: Axis, letter: str) -> None:
    whole = Graph.of([Task(Name.parse("L0.X.F"), Lane.COMPUTE)])
    graph = split(whole, axis, lambda _: 2, lambda task, _: task.cut)
    assert names(graph) == [f"L0.X.{letter}0.F", f"L0.X.{letter}1.F"]


def test_an_edge_to_nothing_is_refused_by_name() -> None:
    with pytest.raises(ScheduleError, match=r"L0\.X\.m0\.c0\.F reads L7\.D\.m0\.c0\.F, which is not in"):
        chain(2, 2, "L7.D.m0.c0.F")


# ---- ends of layers ----------------------------------------------------------------------------------------


def test_added_tasks_stand_behind_the_backward_half_of_their_layer() -> None:
    program = ["L0.AT.m0.F", "L1.AT.m0.F", "L1.AT.m0.B", "L0.AT.m0.B", "L0.EM.m0.B"]
    graph = Graph.of(Task(Name.parse(name), Lane.COMPUTE) for name in program)
    added = {0: [Task(Name.parse("L0.AR.p0.B"), Lane.INTER)], 1: [Task(Name.parse("L1.AR.p0.B"), Lane.INTER)]}
    assert names(end_layers(graph, added)) == [*program[:3], "L1.AR.p0.B", *program[3:], "L0.AR.p0.B"]
    assert names(end_layers(graph, {})) == program


def test_a_layer_without_a_backward_half_has_no_end() -> None:
    added = {0: [Task(Name.parse("L0.AR.p0.B"), Lane.INTER)]}
    with pytest.raises(ScheduleError, match=r"^layer 0 has no backward: transpose the step first$"):
        end_layers(PLAIN, added)
    assert end_layers(PLAIN, {0: []}) == PLAIN
