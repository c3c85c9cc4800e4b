"""The result table keeps every outcome exactly as long as somebody will read it."""

from __future__ import annotations

import random
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.runtime.results import Outcome, ResultTable

from penstock.graph import Graph, Phase, Task
from penstock.step import StepShape, build_graph
from tests.steps import seeds, shapes


class Thing:
    """Something whose end can be seen."""


class Watched:
    """A run over a graph, one task at a time, in any valid order; knows which things are alive."""

    def __init__(self, graph: Graph, tasks: list[Task]) -> None:
        self.graph, self.tasks = graph, tasks
        self.table = ResultTable(graph, tasks)
        self.values: dict[Task, weakref.ref[Thing]] = {}
        self.saved: dict[Task, weakref.ref[Thing]] = {}
        self.ran: set[Task] = set()

    def run(self, task: Task) -> None:
        for need in self.graph.needs[task]:
            seen = self.table.read(task, need)
            assert seen is (self.values if need.phase is task.phase else self.saved)[need]()
            assert seen is not None
        seen = None
        value, saved = Thing(), Thing()
        self.values[task], self.saved[task] = weakref.ref(value), weakref.ref(saved)
        outcome = Outcome(value, saved)
        del value, saved
        self.table.put(task, outcome)
        del outcome
        self.table.done(task)
        self.ran.add(task)

    def readers_to_come(self, task: Task, same_phase: bool) -> list[Task]:
        readers = [r for r in self.graph.readers[task] if r in self.tasks and r not in self.ran]
        return [r for r in readers if (r.phase is task.phase) == same_phase]

    def check(self) -> None:
        """A value lives while a reader of its phase is to come, what was saved while another is."""
        for task in self.ran:
            assert (self.values[task]() is not None) == bool(self.readers_to_come(task, True)), task
            assert (self.saved[task]() is not None) == bool(self.readers_to_come(task, False)), task
        kept = [t for t in self.ran if self.values[t]() or self.saved[t]()]
        assert len(self.table) == len(kept)


def random_order(graph: Graph, tasks: list[Task], seed: int) -> list[Task]:
    """The tasks in a random order in which everything stands after what it needs."""
    rng, left, order = random.Random(seed), list(tasks), list[Task]()
    while left:
        ready = [t for t in left if not any(need in left for need in graph.needs[t])]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


small = shapes(layers=2, pieces=2, chunks=2)


@settings(max_examples=40)
@given(small, seeds)
def test_every_outcome_lives_until_its_last_reader(shape: StepShape, seed: int) -> None:
    graph = build_graph(shape)
    run = Watched(graph, list(graph.tasks))
    for task in random_order(graph, run.tasks, seed):
        run.run(task)
        run.check()
    assert len(run.table) == 0


@settings(max_examples=40)
@given(small, seeds)
def test_evaluation_saves_nothing(shape: StepShape, seed: int) -> None:
    """With the forward tasks alone nobody will read what they save: it goes at once."""
    graph = build_graph(shape)
    run = Watched(graph, [task for task in graph.tasks if task.phase is Phase.FORWARD])
    for task in random_order(graph, run.tasks, seed):
        run.run(task)
        run.check()
        assert run.saved[task]() is None
    assert len(run.table) == 0


@given(st.booleans())
def test_backward_reads_what_was_saved_and_not_the_value(value_is_none: bool) -> None:
    graph = build_graph(StepShape(moe_layers=(False,)))
    table = ResultTable(graph, graph.tasks)
    forward, backward = Task.parse("L0.EM.m0.F"), Task.parse("L0.EM.m0.B")
    table.put(forward, Outcome(None if value_is_none else "value", "saved"))
    assert table.read(backward, forward) == "saved"
    assert table.read(Task.parse("L0.AT.m0.F"), forward) == (None if value_is_none else "value")
