"""State that tasks touch: who must be ordered, and what is said where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.graph import Cut, Graph, Lane, Name, Phase, ScheduleError, Task
from penstock.graph.graph import lasts
from penstock.graph.task import WHOLE
from penstock.step import StepShape

GRADIENTS, WEIGHTS, GATHERED = "gradients of L0", "parameters of L0", "gathered parameters of L0"


Names = tuple[str, ...]


def task(
    text: str,
    lane: Lane = Lane.COMPUTE,
    after: str = "",
    *,
    accumulates: Names = (),
    reads: Names = (),
    writes: Names = (),
) -> Task:
    inputs = {"after": tuple(Name.parse(name) for name in after.split())} if after else {}
    return Task(Name.parse(text), lane, (), inputs, WHOLE, accumulates, reads, writes)


def refuses(tasks: tuple[Task, ...], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Graph.of(tasks).check()
    assert str(caught.value) == message


USE = task("L0.AT.m0.F", reads=(WEIGHTS,))
UPDATE = task("L0.UP.B", Lane.HOST, writes=(WEIGHTS, "moments of L0"), reads=("moments of L0",))


def test_what_lasts_may_be_read_first() -> None:
    """The value of the step before, which edges keep until it has been read."""
    assert [lasts(state) for state in (WEIGHTS, "expert moments of L3", GRADIENTS, GATHERED)] == [
        True,
        True,
        False,
        False,
    ]
    Graph.of([USE, replace(UPDATE, inputs={"gradients": (USE.name,)})]).check()
    Graph.of([UPDATE, replace(USE, inputs={"weights": (UPDATE.name,)})]).check()


def test_what_lasts_needs_an_edge_to_or_from_its_writer() -> None:
    refuses(
        (USE, UPDATE),
        "L0.AT.m0.F reads parameters of L0, which L0.UP.B writes: without an edge between them the schedule "
        "decides whether that is this step's value or the last one's",
    )


def test_what_a_step_makes_is_read_behind_its_writer() -> None:
    gather = task("L0.PG.F", Lane.INTER, writes=(GATHERED,))
    use = task("L0.AT.m0.F", reads=(GATHERED,))
    Graph.of([gather, replace(use, inputs={"weights": (gather.name,)})]).check()
    message = (
        "L0.AT.m0.F reads gathered parameters of L0 before L0.PG.F has written it: no edge leads from one to "
        "the other"
    )
    refuses((gather, use), message)
    refuses((use, replace(gather, inputs={"after": (use.name,)})), message)


def test_what_is_changed_in_place_may_have_been_read_before() -> None:
    """Gradients are summed over ranks, then clipped, then used: both of the first read and write."""
    add = task("L0.AT.m0.B", accumulates=(GRADIENTS,))
    both = (GRADIENTS,)
    reduce = task("L0.AR.B", Lane.INTER, after="L0.AT.m0.B", reads=both, writes=both)
    clip = task("L0.CL.B", after="L0.AR.B", reads=both, writes=both)
    Graph.of([add, reduce, clip, task("L0.UP.B", after="L0.CL.B", reads=(GRADIENTS,))]).check()
    refuses(
        (add, reduce, clip, task("L0.UP.B", after="L0.AR.B", reads=(GRADIENTS,), writes=(GRADIENTS,))),
        "L0.CL.B reads gradients of L0 before L0.UP.B has written it: no edge leads from one to the other",
    )


def test_two_writers_need_an_order() -> None:
    first, second = task("L0.UP.B", writes=(WEIGHTS,)), task("L0.MV.B", Lane.INTER, writes=(WEIGHTS,))
    refuses(
        (first, second),
        "L0.UP.B and L0.MV.B both write parameters of L0, and no edge says which of them comes last",
    )
    Graph.of([first, replace(second, inputs={"weights": (first.name,)})]).check()


def test_whoever_starts_a_sum_stands_before_all_that_add() -> None:
    clear = task("L0.ZG.B", writes=(GRADIENTS,))
    add = task("L0.AT.m0.B", accumulates=(GRADIENTS,))
    refuses(
        (clear, add),
        "L0.AT.m0.B adds to gradients of L0, which L0.ZG.B writes, and no edge says which comes first",
    )
    Graph.of([clear, replace(add, inputs={"cleared": (clear.name,)})]).check()


def test_two_lanes_do_not_add_at_the_same_time() -> None:
    first = task("L0.AT.m0.B", accumulates=(GRADIENTS,))
    second = task("L0.AG.m0.B", Lane.INTRA, accumulates=(GRADIENTS,))
    refuses(
        (first, second),
        "L0.AT.m0.B on lane compute and L0.AG.m0.B on lane intra both add to gradients of L0, perhaps at the "
        "same time: give them an edge or one lane",
    )
    Graph.of([first, replace(second, lane=Lane.COMPUTE)]).check()
    Graph.of([first, replace(second, inputs={"rows": (first.name,)})]).check()


def test_pieces_of_a_buffer_do_not_meet() -> None:
    """Cut alike; where cuts differ, any two pieces may overlap."""
    thirds = Cut(parts=(1, 1, 1))
    pieces = [replace(task(f"L0.UP.p{i}.B", writes=(WEIGHTS,)), cut=thirds) for i in range(3)]
    Graph.of(pieces).check()
    reader = replace(task("L0.PG.p1.B", Lane.INTER, after="L0.UP.p1.B", reads=(WEIGHTS,)), cut=thirds)
    Graph.of([*pieces, reader]).check()
    with pytest.raises(ScheduleError, match=r"L0\.PG\.p1\.B reads parameters of L0, which L0\.UP\.p0\.B"):
        Graph.of([*pieces, replace(reader, cut=Cut(parts=(2, 1)))]).check()


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


# ---- against every pair ------------------------------------------------------------------------------------

STATES = (WEIGHTS, GRADIENTS)
ACCESS = ("", "r", "w", "rw", "a")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    tasks: list[Task] = []
    for i in range(draw(st.integers(2, 6))):
        after = draw(st.sets(st.sampled_from(range(i)))) if i else set()
        touch = {state: draw(st.sampled_from(ACCESS)) for state in STATES}
        inputs = {"after": tuple(tasks[j].name for j in sorted(after))} if after else {}
        piece = draw(st.sampled_from([None, None, 0, 1]))
        name = Name(i, "UP", Phase.BACKWARD, piece=piece)
        tasks.append(
            Task(
                name,
                draw(st.sampled_from([Lane.COMPUTE, Lane.INTER])),
                (),
                inputs,
                Cut(parts=draw(st.sampled_from([(1, 1), (2, 1)])) if piece is not None else (1,)),
                accumulates=tuple(state for state, how in touch.items() if how == "a"),
                reads=tuple(state for state, how in touch.items() if "r" in how),
                writes=tuple(state for state, how in touch.items() if "w" in how),
            )
        )
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


@given(graphs())
def test_a_graph_is_refused_if_and_only_if_a_pair_lacks_its_order(graph: Graph) -> None:
    wrong = list(conflicts(graph))
    if not wrong:
        graph.check()
        return
    with pytest.raises(ScheduleError) as caught:
        graph.check()
    said = str(caught.value)
    assert any(state in said and str(one) in said and str(two) in said for state, one, two in wrong), said
