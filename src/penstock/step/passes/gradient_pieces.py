"""The all-reduces of gradients, one buffer per layer, each cut into pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.graph import Cut, Graph, Lane, Name, Phase, Task
from penstock.mesh import Axes, Group
from penstock.ops.blocks import EXPERTS, REPLICATED
from penstock.ops.names import Op
from penstock.step.rewrite import end_layers
from penstock.step.stages import Stage

Parts = Sequence[Sequence[int]]
"""For every layer the relative sizes of the pieces of its buffer; none = nothing to reduce."""


@dataclass(frozen=True)
class GradientPieces:
    """A piece waits for every task that adds to its buffer, directly or through one that does.

    before  AT.m1.B, AT.m0.B
    after   AT.m1.B, AT.m0.B ─gradients─ AR.p0, AR.p1          X.m*.B ─gradients─ XR.p0
    """

    replicated: Parts
    experts: Parts
    name = "gradient_pieces"
    stage = Stage.GRADIENTS

    def __call__(self, graph: Graph) -> Graph:
        last = _last_to_add(graph)
        added: dict[int, list[Task]] = {}
        for op, state, axes, layers in (
            (Op.EXPERT_ALL_REDUCE, EXPERTS, Group.EXPERT_REPLICAS, self.experts),
            (Op.ALL_REDUCE, REPLICATED, Group.WORLD, self.replicated),
        ):
            for layer, parts in enumerate(layers):
                buffer = state.format(layer=layer)
                pieces = _pieces(op, layer, axes, tuple(parts), last.get(buffer, ()), buffer)
                added.setdefault(layer, []).extend(pieces)
        return end_layers(graph, added)


def _pieces(
    op: str, layer: int, axes: Axes, parts: tuple[int, ...], read: Sequence[Name], buffer: str
) -> list[Task]:
    if not read:
        return []
    cut, inputs = Cut(parts=parts), {"gradients": tuple(read)}
    return [
        Task(Name(layer, op, Phase.BACKWARD, piece=piece), Lane.INTER, axes, inputs, cut, reads=(buffer,))
        for piece in range(len(parts))
    ]


def _last_to_add(graph: Graph) -> dict[str, list[Name]]:
    """For every buffer the tasks that add to it and after which, in their layer, no other does."""
    own = graph.by_name
    followed: dict[Name, set[str]] = defaultdict(set)
    for task in reversed(graph.tasks):
        states = followed[task.name].union(task.accumulates)
        for name in task.sources():
            if own[name].layer == task.layer:
                followed[name] |= states
    found: dict[str, list[Name]] = {}
    for task in graph.tasks:
        for state in task.accumulates:
            if state not in followed[task.name]:
                found.setdefault(state, []).append(task.name)
    return found
