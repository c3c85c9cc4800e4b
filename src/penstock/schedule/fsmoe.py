"""FSMoE (ASPLOS 2025): chunks chosen separately for forward and backward, gradients cut to fit the gaps."""

from __future__ import annotations

from dataclasses import replace

from penstock.decision import TAIL, Decision, GradientBytes, Partition, Portion, Slot
from penstock.graph import Graph, Task
from penstock.ops.core import summed
from penstock.schedule.moe_pipeline import MoEPipeline
from penstock.schedule.schedule import Schedule
from penstock.schedule.system import dense_gap, reduce_in_gaps
from penstock.step import StepShape
from penstock.timing import Cost


class FSMoE(MoEPipeline):
    """Chunks inside the MoE layer, a different number in the backward pass, and gradients in the gaps there.

    Where ranks of a node share experts, rows cross nodes once (D, C) and meet all shards inside the node
    (XG, XS): chunks are in transit on both networks while another is computed. All gathers come before any
    scatter, as in the published issue order. Gradients are reduced between the two groups of all-to-alls of a
    lower MoE layer, where experts leave the network between nodes idle, and under attention (Section 4 of the
    paper). `partition` decides which bytes go into which gap; by default all of a layer's go into the first
    gap below it. Gradients that ranks have parts of (PR) go under attention of the next layer.

    fsmoe: one column = one slot, · = idle
    forward
    layer    L0                                                              L1
    compute  EM0 ·   ·   TA0 ·   GT0 ·  ·  ·    X0    X0.1 ·     ·    U0 ·   TA0 ·   GT0 ·  ·  ·    X0    X0.1
    intra    ·   ES0 TG0 ·   TS0 ·   ·  ·  XG0  XG0.1 XS0  XS0.1 ·    ·  TG0 ·   TS0 ·   ·  ·  XG0  XG0.1 XS0
    inter    ·   ·   ·   ·   ·   ·   N0 D0 D0.1 ·     ·    C0    C0.1 ·  ·   ·   ·   ·   N0 D0 D0.1 ·     ·

    layer
    compute  ·     ·    U0 ·   HV0 ·   HL0 ·
    intra    XS0.1 ·    ·  HG0 ·   HX0 ·   ·
    inter    C0    C0.1 ·  ·   ·   ·   ·   ST
    backward
    layer    L1                                                                       L0
    compute  HL0 HV0 ·   U0 ·  ·    X0    X0.1  X0.2 ·     ·     ·    GT0 ·   TA0 ·   U0 ·  ·    X0    X0.1
    intra    ·   ·   HG0 ·  ·  XS0  XS0.1 XS0.2 XG0  XG0.1 XG0.2 ·    ·   TS0 ·   TG0 ·  ·  XS0  XS0.1 XS0.2
    inter    ·   ·   ·   ·  C0 C0.1 C0.2  ·     ·    D0    D0.1  D0.2 ·   ·   ·   ·   ·  C0 C0.1 C0.2  AR1.0

    layer
    compute  X0.2 ·     ·     ·    GT0   ·   TA0 ·   ·   EM0 ·     ·
    intra    XG0  XG0.1 XG0.2 ·    ·     TS0 ·   TG0 ES0 ·   ·     ·
    inter    ·    D0    D0.1  D0.2 PR1.0 ·   ·   ·   ·   ·   AR0.0 PR0.0
    """

    name = "fsmoe"
    reads = ("chunks", "backward_chunks", "partition")
    usual_chunks = 1
    expert_form = "gather"

    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        partition = choice.partition or next_gap(shape.moe_layers, gradients.replicated)
        return replace(super().shape(shape, choice, gradients), all_reduce_parts=partition.parts)

    def order(self, graph: Graph, cost: Cost, choice: Decision) -> Schedule:
        del cost  # costs have decided the partition; the order follows from it
        partition = choice.partition
        if partition is None:  # that by which the graph's gradients were cut
            layers = 1 + max(task.layer for task in graph.tasks)
            cut = [task for task in graph.tasks if summed(task.op) == "replicated"]
            size = {task.layer: sum(task.cut.parts) for task in cut}
            chunked = {task.layer for task in graph.tasks if task.chunk is not None}
            moe_layers = tuple(layer in chunked for layer in range(layers))
            partition = next_gap(moe_layers, tuple(size.get(layer, 0) for layer in range(layers)))
        gaps: dict[Slot, list[Task]] = {}
        replicated = {(t.layer, t.piece): t for t in graph.tasks if summed(t.op) == "replicated"}
        for layer in reversed(range(len(partition.portions))):
            for piece, portion in enumerate(partition.portions[layer]):
                slot = TAIL if portion.slot.part == "tail" else portion.slot
                gaps.setdefault(slot, []).append(replicated[layer, piece])
        for task in graph.tasks:
            if summed(task.op) == "experts":
                gaps.setdefault(dense_gap(task.layer), []).append(task)
            elif summed(task.op) == "partial":
                gaps.setdefault(dense_gap(task.layer - 1), []).append(task)
        return reduce_in_gaps(self.name, graph, gaps)


def next_gap(moe_layers: tuple[bool, ...], all_reduce_bytes: tuple[int, ...]) -> Partition:
    """Return each layer's gradients in one portion, in the next MoE layer's gap below, or at the tail."""
    portions, slot = [], TAIL
    for layer, size in enumerate(all_reduce_bytes):
        portions.append((Portion(size_bytes=size, slot=slot),) if size else ())
        if moe_layers[layer]:
            slot = Slot(layer=layer, part="moe")
    return Partition(tuple(portions))
