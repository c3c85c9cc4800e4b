"""Room for whole gradients that are freed once they are summed: room for two layers, never more."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from penstock.graph import Graph, Name, Task
from penstock.ops.names import Op
from penstock.ops.sums import SCATTERS
from penstock.step.stages import Stage

LAYERS = 2
"""One layer's gradients are made while those of the layer above are summed."""

ROOM = "room"


@dataclass(frozen=True)
class GradientRoom:
    """ZeRO's stage 2. Without it, sums on a slow network would wait, and all whole gradients with them.

    before  L2.RA.p0, L2.RA.p1          L0.U.B ─rows─ L0.C.B
    after   L2.RA.p0, L2.RA.p1 ─room─ L0.U.B ─rows─ L0.C.B

    The first tasks to add to a layer's gradients wait for the sums of the layer two above. replicas: whether
    experts have replicas; without them, their gradients are summed with no other rank's and stay.
    """

    edp: bool
    name = "gradient_room"
    stage = Stage.GRADIENTS

    def __call__(self, graph: Graph) -> Graph:
        freed: dict[int, list[Name]] = defaultdict(list)
        for task in graph.tasks:
            if task.op in SCATTERS and (self.edp or task.op != Op.EXPERT_SCATTER):
                freed[task.layer].append(task.name)
        after: set[Name] = set()
        firsts: set[Name] = set()
        for task in graph.tasks:
            waits = any(name in after for name in task.sources() if name.layer == task.layer)
            if waits or task.accumulates:
                after.add(task.name)
            if task.accumulates and not waits:
                firsts.add(task.name)
        return Graph.of([_waiting(task, freed) if task.name in firsts else task for task in graph.tasks])


def _waiting(task: Task, freed: dict[int, list[Name]]) -> Task:
    names = tuple(freed.get(task.layer + LAYERS, ()))
    return task.reading({**task.inputs, ROOM: names}) if names else task
