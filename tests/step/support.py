"""What tests of passes share: a pass made of a function, and edges as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
