"""What tests of passes share: a pass made of a function, and edges as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.graph import Graph, Task
from penstock.step import Stage
from tests.steps import task_at


@dataclass(frozen=True)
class Rewriting:
    """A pass that does what a function says."""

    name: str
    stage: Stage
    rewrite: Callable[[Graph], Graph]

    def __call__(self, graph: Graph) -> Graph:
        return self.rewrite(graph)


def names(graph: Graph) -> list[str]:
    """Every task's name, in program order."""
    return list(map(str, graph.tasks))


def reads(graph: Graph, text: str) -> dict[str, str]:
    """What a task reads by role, several names with spaces between them."""
    return {role: " ".join(map(str, found)) for role, found in task_at(graph, text).inputs.items()}


def needs(graph: Graph, text: str) -> set[str]:
    """The tasks that a task reads."""
    return set(map(str, graph.needs[task_at(graph, text)]))


def ancestors(graph: Graph, start: Task) -> set[Task]:
    """Every task from which edges lead to `start`."""
    found: set[Task] = set()
    queue = [start]
    while queue:
        new = [need for need in graph.needs[queue.pop()] if need not in found]
        found.update(new)
        queue += new
    return found


def check_chain(graph: Graph, chain: Sequence[str]) -> None:
    """In both layers rows go from attention along these ops, and gradients the same way back."""
    for layer in (0, 1):
        for first, second in pairwise(chain):
            there, back = f"L{layer}.{first}.m0.c0", f"L{layer}.{second}.m0.c0"
            assert reads(graph, f"{back}.F")["rows"] == f"{there}.F"
            assert reads(graph, f"{there}.B")["d_rows"] == f"{back}.B"
        assert reads(graph, f"L{layer}.{chain[0]}.m0.c0.F")["rows"] == f"L{layer}.AT.m0.F"
        assert reads(graph, f"L{layer}.U.m0.F")["rows"] == f"L{layer}.{chain[-1]}.m0.c0.F"
        assert reads(graph, f"L{layer}.AT.m0.B")["d_rows"] == f"L{layer}.{chain[0]}.m0.c0.B"
