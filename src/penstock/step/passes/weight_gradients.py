"""The backward of experts in two tasks: the input gradients that the wire waits for, and the weights'."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.graph import Graph, Name, Phase, Task
from penstock.ops.names import Op
from penstock.step.rewrite import end_layers
from penstock.step.stages import Stage


@dataclass(frozen=True)
class WeightGradients:
    """X.B becomes X.I, which the next leg reads, and X.W, which nothing but the update needs.

    before  C.B ─d_rows─ X.B ─d_rows─ D.B
    after   C.B ─d_rows─ X.I ─d_rows─ D.B          X.I ─left─ X.W
    """

    name = "weight_gradients"
    stage = Stage.WEIGHTS

    def __call__(self, graph: Graph) -> Graph:
        out: list[Task] = []
        added: dict[int, list[Task]] = {}
        for task in graph.tasks:
            inputs = {role: tuple(map(_renamed, read)) for role, read in task.inputs.items()}
            task = replace(task, inputs=inputs)  # noqa: PLW2901
            if _is_experts_backward(task.name):
                name = _renamed(task.name)
                weights = name._replace(phase=Phase.WEIGHT)
                read = {"left": (name,)}
                last = Task(weights, task.lane, (), read, task.cut, accumulates=task.accumulates)
                added.setdefault(task.layer, []).append(last)
                task = replace(task, name=name, accumulates=())  # noqa: PLW2901
            out.append(task)
        return end_layers(Graph.of(out), added)


def _is_experts_backward(name: Name) -> bool:
    return name.op == Op.EXPERTS and name.phase is Phase.BACKWARD


def _renamed(name: Name) -> Name:
    return name._replace(phase=Phase.INPUT) if _is_experts_backward(name) else name
