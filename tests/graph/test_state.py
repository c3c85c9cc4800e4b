"""State that tasks touch: who must be ordered, and what is said where they are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.graph import Cut, Graph, Lane, Name, Phase, ScheduleError, Task
from penstock.graph.graph import lasts
from penstock.step import StepShape

Piece = tuple[int | None, tuple[int, ...]]


def test_tasks_of_a_step_read_their_parameters() -> None:
    """So that an update which a pass adds is refused unless it waits for all of them."""
    graph = build_graph(StepShape(moe_layers=(True, False), microbatches=2))
    reading = {str(t) for t in graph.tasks if "parameters of L1" in t.reads}
    assert {"L1.AT.m0.F", "L1.AT.m1.B", "L1.HD.m0.F"} <= reading
    assert "L0.X.m0.c0.F" in {str(t) for t in graph.tasks if "expert parameters of L0" in t.reads}
    early = Task(Name(1, "UP", Phase.BACKWARD), Lane.HOST, (), {}, writes=("parameters of L1",))
    with pytest.raises(ScheduleError, match=r"^L1\.AT\.m0\.F reads parameters of L1, which L1\.UP\.B writes"):
        Graph.of([*graph.tasks, early]).check()
    last = {"gradients": (Name.parse("L1.AR.p0.B"),)}
    Graph.of([*graph.tasks, replace(early, inputs=last)]).check()


def test_what_lasts_from_step_to_step() -> None:
    assert lasts("parameters of L0") and lasts("expert moments of L3")
    assert not lasts("gradients of L0") and not lasts("gathered parameters of L0")


# ---- against every pair ------------------------------------------------------------------------------------

STATES = ("parameters of L0", "gradients of L0")
ACCESS = ("", "r", "w", "rw", "a")
LANES = (Lane.COMPUTE, Lane.INTER)
PIECES = ((None, (1,)), (0, (1, 1)), (1, (1, 1)), (0, (2, 1)))
"""Pieces of a buffer, and how it is cut."""


def task(after: Sequence[Task], number: int, lane: Lane, piece: Piece, touch: dict[str, str]) -> Task:
    """A task after others; touch: how it touches states."""
    index, parts = piece
    return Task(
        Name(number, "UP", Phase.BACKWARD, piece=index),
        lane,
        (),
        {"after": tuple(each.name for each in after)},
        Cut(parts=parts),
        accumulates=tuple(state for state, how in touch.items() if how == "a"),
        reads=tuple(state for state, how in touch.items() if "r" in how),
        writes=tuple(state for state, how in touch.items() if "w" in how),
    )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    tasks: list[Task] = []
    for i in range(draw(st.integers(2, 6))):
        after = [tasks[j] for j in sorted(draw(st.sets(st.sampled_from(range(i)))))] if i else []
        touch = {state: draw(st.sampled_from(ACCESS)) for state in STATES}
        tasks.append(task(after, i, draw(st.sampled_from(LANES)), draw(st.sampled_from(PIECES)), touch))
    return Graph.of(tasks)


def conflicts(graph: Graph) -> Iterator[tuple[str, Task, Task]]:
    """Pairs that touch a state without the order that they need, each found by looking at all pairs."""
    behind: dict[Task, set[Task]] = {}
    for task in graph.tasks:
        needs = graph.needs[task]
        behind[task] = {*needs, *(far for need in needs for far in behind[need])}
    for state in STATES:
        for one, two in permutations(graph.tasks, 2):
            apart = None not in (one.piece, two.piece) and one.cut == two.cut and one.piece != two.piece
            first, last = one in behind[two], two in behind[one]
            reads, changes = state in one.reads, state in two.writes and not apart
            stale = lasts(state) or state in two.reads
            wrong = (
                (reads and state in two.accumulates and not last)
                or (reads and changes and not last and not (first and stale))
                or (state in one.writes and changes and not first and not last)
                or (state in one.writes and state in two.accumulates and not first and not last)
                or (
                    state in one.accumulates
                    and state in two.accumulates
                    and one.lane is not two.lane
                    and not first
                    and not last
                )
            )
            if wrong:
                yield state, one, two


def check(graph: Graph) -> None:
    """The graph is refused if and only if a pair lacks its order."""
    wrong = list(conflicts(graph))
    if not wrong:
        graph.check()
        return
    with pytest.raises(ScheduleError) as caught:
        graph.check()
    said = str(caught.value)
    assert any(state in said and str(one) in said and str(two) in said for state, one, two in wrong), said


@given(graphs())
def test_a_graph_is_refused_if_and_only_if_a_pair_lacks_its_order(graph: Graph) -> None:
    check(graph)


@pytest.mark.parametrize("state", STATES)
def test_two_tasks_are_refused_if_and_only_if_they_lack_an_order(state: str) -> None:
    every = list(product(LANES, PIECES, ACCESS))
    for (lane, piece, how), (other, part, also), linked in product(every, every, (False, True)):
        first = task((), 0, lane, piece, {state: how})
        check(Graph.of([first, task((first,) * linked, 1, other, part, {state: also})]))
