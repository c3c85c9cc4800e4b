"""A graph of tasks: edges by name, its text, and what its check finds."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from penstock.graph import Graph, Lane, Name, ScheduleError, Task
from penstock.mesh import Group


def task(
    text: str,
    *,
    accumulates: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    **inputs: str,
) -> Task:
    """A task of the compute lane; inputs by role, several names with commas between them."""
    read = {role: tuple(map(Name.parse, names.split(","))) for role, names in inputs.items()}
    return Task(Name.parse(text), Lane.COMPUTE, (), read, accumulates=accumulates, reads=reads)


def named(found: Mapping[Task, tuple[Task, ...]]) -> dict[str, list[str]]:
    return {str(key): list(map(str, tasks)) for key, tasks in found.items()}


CHAIN = (
    task("L0.EM.m0.F"),
    task("L0.AT.m0.F", hidden="L0.EM.m0.F"),
    task("L0.U.m0.F", residual="L0.AT.m0.F", rows="L0.EM.m0.F", weights="L0.AT.m0.F"),
)


def test_edges_are_found_by_name_and_stand_once() -> None:
    graph = Graph.of(CHAIN).check()
    assert named(graph.needs) == {
        "L0.EM.m0.F": [],
        "L0.AT.m0.F": ["L0.EM.m0.F"],
        "L0.U.m0.F": ["L0.AT.m0.F", "L0.EM.m0.F"],
    }
    assert named(graph.readers) == {
        "L0.EM.m0.F": ["L0.AT.m0.F", "L0.U.m0.F"],
        "L0.AT.m0.F": ["L0.U.m0.F"],
        "L0.U.m0.F": [],
    }
    assert [graph.position[each] for each in CHAIN] == [0, 1, 2]
    assert all(need is graph.by_name[need.name] for needs in graph.needs.values() for need in needs)


def test_the_text_form_has_a_line_per_task() -> None:
    there = Task(Name.parse("L0.D.m0.c1.F"), Lane.INTER, Group.WORLD, {"rows": (Name.parse("L0.AT.m0.F"),)})
    assert Graph.of([*CHAIN[:2], there]).text() == (
        "L0.EM.m0.F compute -\n"
        "L0.AT.m0.F compute - hidden=L0.EM.m0.F\n"
        "L0.D.m0.c1.F inter dpxtp rows=L0.AT.m0.F\n"
    )


def refuses(tasks: tuple[Task, ...], why: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(why)}$"):
        Graph.of(tasks).check()


def test_two_tasks_of_one_name_are_refused() -> None:
    other = task("L0.AT.m0.F", rows="L0.EM.m0.F")
    for again in (other, CHAIN[1]):  # another task of that name, and the very same
        refuses((*CHAIN, again), "two tasks are called L0.AT.m0.F")


def test_an_edge_to_nothing_is_refused() -> None:
    refuses(CHAIN[1:], "L0.AT.m0.F reads hidden of L0.EM.m0.F, which is not in the graph")


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_cycle_is_refused(length: int) -> None:
    """Program order must put every task after what it reads, and no order of a cycle does."""
    names = [f"L{i}.AT.m0.F" for i in range(length)]
    tasks = tuple(task(name, hidden=names[i - 1]) for i, name in enumerate(names))
    refuses(
        tasks,
        f"L0.AT.m0.F reads hidden of L{length - 1}.AT.m0.F, which comes after it: the graph has a cycle",
    )
