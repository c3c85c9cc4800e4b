"""The all-reduces of gradients, one buffer per layer, each cut into pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from penstock.graph import Cut, Graph, Lane, Name, Phase, Task
from penstock.ops.gradients import GRADIENT_KINDS, KindName
from penstock.step.rewrite import end_layers
from penstock.step.stages import Stage

Parts = Sequence[Sequence[int]]
"""For every layer the relative sizes of the pieces of its buffer; none = nothing to reduce."""


@dataclass(frozen=True)
class GradientPieces:
    """Every piece waits for all tasks that add to its buffer, directly or through another of them.

    before  AT.m1.B, AT.m0.B
    after   AT.m1.B, AT.m0.B ─gradients─ AR.p0, AR.p1          X.m*.B ─gradients─ XR.p0

    parts: by kind of gradients. sharing: whether ranks share attention. scatters: whether every rank
    keeps its share of a sum (RA, RP, RX stand for AR, PR, XR).
    """

    parts: Mapping[KindName, Parts]
    sharing: bool = False
    scatters: bool = False
    name = "gradient_pieces"
    stage = Stage.GRADIENTS

    def __call__(self, graph: Graph) -> Graph:
        last = last_to_add(graph)
        added: dict[int, list[Task]] = {}
        for layer in range(max(map(len, self.parts.values()))):
            sizes = {kind: parts[layer] for kind, parts in self.parts.items()}
            made = reductions(layer, sizes, last, sharing=self.sharing, scatters=self.scatters)
            # Experts first: their gradients are complete before those of the layer's attention.
            added[layer] = [task for kind in reversed(made) for task in made[kind]]
        return end_layers(graph, added)


def reductions(
    layer: int,
    parts: Mapping[KindName, Sequence[int]],
    last: Mapping[str, Sequence[Name]] | None = None,
    *,
    sharing: bool = False,
    scatters: bool = False,
) -> dict[KindName, list[Task]]:
    """Return the pieces of a layer's gradients, by kind. parts: of every buffer, by kind.

    last: the tasks after which a buffer is complete; nothing adds to a buffer that it does not name. None =
    tasks without inputs, only to be priced. sharing, scatters: see GradientPieces.
    """
    found = {}
    for name, sizes in parts.items():
        kind = GRADIENT_KINDS[name]
        op, buffer, axes = (
            kind.sums(scatters=scatters),
            kind.state.format(layer=layer),
            kind.axes_of(sharing=sharing),
        )
        inputs = {} if last is None else {"gradients": tuple(last.get(buffer, ()))}
        pieces = range(len(sizes) if last is None or inputs["gradients"] else 0)
        names = [Name(layer, op, Phase.BACKWARD, piece=piece) for piece in pieces]
        cut = Cut(parts=tuple(sizes))
        touched = (), (buffer,), (buffer,)  # summed in place
        found[name] = [Task(each, Lane.INTER, axes, inputs, cut, *touched) for each in names]
    return found


@lru_cache(maxsize=8)
def last_to_add(graph: Graph) -> Mapping[str, Sequence[Name]]:
    """Return for every buffer the tasks that add to it and after which, in their layer, no other does."""
    begin = next((i for i, task in enumerate(graph.tasks) if task.accumulates), len(graph.tasks))
    followed: dict[Name, set[str]] = defaultdict(set)
    for task in reversed(graph.tasks[begin:]):
        states = followed[task.name].union(task.accumulates)
        for name in task.sources():
            if name.layer == task.layer:
                followed[name] |= states
    found: dict[str, list[Name]] = {}
    for task in graph.tasks[begin:]:
        for state in task.accumulates:
            if state not in followed[task.name]:
                found.setdefault(state, []).append(task.name)
    return found
