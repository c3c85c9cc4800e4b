"""The backward of experts as two tasks: input gradients, for which the wire waits, and weight gradients."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph import Graph, Phase, Task
from penstock.ops.blocks import PARTIAL, REPLICATED
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
        halves = {task.name: task.name._replace(phase=Phase.INPUT) for task in filter(_splits, graph.tasks)}
        out: list[Task] = []
        added: dict[int, list[Task]] = {}
        for task in graph.tasks:
            inputs = task.inputs
            if not halves.keys().isdisjoint(task.sources()):
                inputs = {role: tuple(halves.get(n, n) for n in names) for role, names in inputs.items()}
            if task.name in halves:
                name = halves[task.name]
                # Experts' gradients can wait for X.W; X.I adds to the others.
                dense = [state.format(layer=task.layer) for state in (REPLICATED, PARTIAL)]
                late = tuple(state for state in task.accumulates if state not in dense)
                early = tuple(state for state in task.accumulates if state in dense)
                out.append(Task(name, task.lane, task.axes, inputs, task.cut, early, task.reads))
                weights, left = name._replace(phase=Phase.WEIGHT), {"left": (name,)}
                last = Task(weights, task.lane, (), left, task.cut, late)
                added.setdefault(task.layer, []).append(last)
            else:
                out.append(task if inputs is task.inputs else task.reading(inputs))
        return end_layers(Graph.of(out), added)


def _splits(task: Task) -> bool:
    return task.op == Op.EXPERTS and task.phase is Phase.BACKWARD
