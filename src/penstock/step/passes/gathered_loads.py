"""The number of every rank's rows that went to each expert, told to all ranks once per step."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph import Graph, Lane, Name, Phase, Task
from penstock.mesh import Group
from penstock.ops.names import Op
from penstock.step.rewrite import end_layers, require
from penstock.step.stages import Stage


@dataclass(frozen=True)
class GatheredLoads:
    """One small all-gather of what the gates have counted, for planners and metrics.

    It belongs to the backward half, after the loss: no task of the step waits for it, an evaluation does
    without, and the network has a gap there while the head computes.

    before  AT.m0, AT.m1 ─routers─ ST
    after   AT.m0, AT.m1 ─routers─ ST ─statistics─ LG.B          AT.m0, AT.m1 ─routers─ LG.B
    """

    name = "gathered_loads"
    stage = Stage.GRADIENTS

    def __call__(self, graph: Graph) -> Graph:
        require(graph, Op.STATISTICS, "routers")
        (total,) = [task for task in graph.tasks if task.op == Op.STATISTICS]
        inputs = {"routers": total.inputs["routers"], "statistics": (total.name,)}
        name = Name(total.layer, Op.LOADS, Phase.BACKWARD)
        return end_layers(graph, {total.layer: [Task(name, Lane.INTER, Group.WORLD, inputs)]})
