"""All-reduces under dense parts only: what FSMoE's paper compares with as Tutel-Improved."""

from __future__ import annotations

from penstock.decision import Decision, Slot
from penstock.graph import Graph, Task
from penstock.ops.core import summed
from penstock.schedule.moe_pipeline import MoEPipeline
from penstock.schedule.schedule import Schedule
from penstock.schedule.system import dense_gap, is_all_reduce, reduce_in_gaps
from penstock.timing import Cost


class DenseOverlap(MoEPipeline):
    """Chunks of tokens inside each MoE layer; a layer's all-reduce runs under attention of the one below.

    Never between the all-to-alls of an MoE layer, although experts leave the network idle there. Gradients of
    layer 0 have no attention below them and are reduced at the end; those of experts that have replicas are
    made before their own layer's attention, and reduced under it.

    dense_overlap: one column = one slot, · = idle
    forward
    layer    L0                              L1
    compute  EM0 AT0 ·  ·  X0   X0.1 ·    U0 AT0 ·  ·  X0   X0.1 ·    U0 HD0 ·
    inter    ·   ·   N0 D0 D0.1 C0   C0.1 ·  ·   N0 D0 D0.1 C0   C0.1 ·  ·   ST
    backward
    layer    L1                           L0
    compute  HD0 U0 ·  X0   X0.1 ·    AT0 U0 ·  X0   X0.1 ·    AT0   EM0 ·
    inter    ·   ·  C0 C0.1 D0   D0.1 ·   ·  C0 C0.1 D0   D0.1 AR1.0 ·   AR0.0
    """

    name = "dense_overlap"

    def order(self, graph: Graph, cost: Cost, choice: Decision) -> Schedule:
        del cost, choice  # where a reduction runs does not depend on how long it takes
        gaps: dict[Slot, list[Task]] = {}
        for task in graph.tasks:
            if is_all_reduce(task):
                layer = task.layer if summed(task.op) == "experts" else task.layer - 1
                gaps.setdefault(dense_gap(layer), []).append(task)
        return reduce_in_gaps(self.name, graph, gaps)
