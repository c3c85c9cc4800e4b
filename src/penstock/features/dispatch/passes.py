"""Legs of dispatch and combine inside the node, around the leg between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.graph import Graph
from penstock.ops.names import Op
from penstock.ops.transfers import Hop
from penstock.step.rewrite import Beside, insert_after, insert_before
from penstock.step.stages import Stage


@dataclass(frozen=True)
class Hierarchical:
    """A dispatch in several legs; combine takes the same legs home, last leg first.

    hops: the legs in their order, one of them D.

        before  AT ─rows─ D ─rows─ X ─rows─ C ─rows─ U
        after   AT ─rows─ DG ─rows─ D ─rows─ DS ─rows─ X ─rows─ CG ─rows─ C ─rows─ CS ─rows─ U
    """

    hops: Sequence[Hop]
    name = "hierarchical"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        middle = [hop.op for hop in self.hops].index(Op.DISPATCH)
        for hop in self.hops[:middle]:
            graph = insert_before(graph, Op.DISPATCH, "rows", Beside(hop).before)
            graph = insert_after(graph, Op.COMBINE, "rows", Beside(hop.home).after)
        for hop in reversed(self.hops[middle + 1 :]):
            graph = insert_after(graph, Op.DISPATCH, "rows", Beside(hop).after)
            graph = insert_before(graph, Op.COMBINE, "rows", Beside(hop.home).before)
        axes, between = self.hops[middle].axes, (Op.DISPATCH, Op.COMBINE)
        return Graph.of(replace(task, axes=axes) if task.op in between else task for task in graph.tasks)
