"""Pictures of edges in the docstrings of passes, read as text and held against graphs.

`AT.m1.B, AT.m0.B ─gradients─ AR.p0` says that AR.p0 reads both under the role `gradients`. What an item
leaves out does not matter; `*` stands for any index; without a phase it is the forward task if there is one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from penstock.graph import Graph, Phase, Task

Edge = tuple[str, str, str]
"""Items read, role, items that read."""


def picture(owner: object) -> tuple[list[str], list[str]]:
    """The chains before and after, as they stand in the docstring."""
    doc = inspect.getdoc(owner) or ""
    found = re.search(r"^ *before +(.*?)^ *after +(.*?)(?:\n\n|\Z)", doc, re.M | re.S)
    assert found, f"no picture in the docstring of {owner}"
    before, after = (re.split(r"\s{2,}|\n| \.\.\. ", part.strip()) for part in found.groups())
    return [chain for chain in before if chain], [chain for chain in after if chain]


def edges(chains: list[str]) -> list[Edge]:
    """Every edge of some chains."""
    found: list[Edge] = []
    for chain in chains:
        items = re.split(r" ─+(\w+)─+ ", chain)
        found += [(items[i], items[i + 1], items[i + 2]) for i in range(0, len(items) - 2, 2)]
    return found


def matching(graph: Graph, items: str, layer: int) -> list[Task]:
    """The tasks of a layer that are meant."""
    return [task for item in items.split(", ") for task in _meant(graph, item, layer)]


def _meant(graph: Graph, item: str, layer: int) -> Iterator[Task]:
    op, *rest = item.split(".")
    tasks = [task for task in graph.tasks if task.op == op and task.layer == layer]
    phases = [Phase(word) for word in rest if word in set(Phase)]
    if not phases and any(task.forward for task in tasks):
        phases = [Phase.FORWARD]
    for task in tasks:
        indices = {"m": task.microbatch, "c": task.chunk, "p": task.piece}
        named = [word for word in rest if word not in set(Phase)]
        if (not phases or task.phase in phases) and all(
            indices[word[0]] is not None and word[1:] in ("*", str(indices[word[0]])) for word in named
        ):
            yield task


def holds(graph: Graph, edge: Edge, layer: int) -> bool:
    """Whether every task on the right reads every task on the left under that role."""
    read, role, readers = edge
    left, right = (matching(graph, items, layer) for items in (read, readers))
    return bool(left and right) and all(
        {task.name for task in left} <= set(reader.inputs.get(role, ())) for reader in right
    )


def check_picture(owner: object, before: Graph, after: Graph, layer: int) -> None:
    """The picture is true of both graphs, and what it shows is new."""
    earlier, later = picture(owner)
    for graph, chains in ((before, earlier), (after, later)):
        assert [edge for edge in edges(chains) if not holds(graph, edge, layer)] == []
        assert all(matching(graph, re.sub(r" ─+\w+─+ ", ", ", chain), layer) for chain in chains)
    assert not all(holds(before, edge, layer) for edge in edges(later))
