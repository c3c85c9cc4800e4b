"""The backward half, derived from the forward half and never written."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from penstock.graph import Graph, Name, Task
from penstock.ops import Backward, spec_of
from penstock.ops.base import gradients_of
from penstock.step.stages import Stage


@dataclass(frozen=True)
class Transpose:
    """Reverses every differentiable edge. A task's gradient needs its readers' gradients and what it saved.

    Roles that are not differentiated (`given` of the reader's op) make no edge back; a transfer, which saves
    nothing, reads them again, and has no backward where it reads nothing else. Sums that normalise the loss
    stand for the gradients of what they read.

        before  AT ─rows─ D ─rows─ X                 N ─route─ D
        after   X.B ─d_rows─ D.B ─d_rows─ AT.B       N ─route─ D.B       X ─saved─ X.B     ST ─d_loss─ HD.B
    """

    name = "transpose"
    stage = Stage.TRANSPOSE

    def __call__(self, graph: Graph) -> Graph:
        wanted = _gradients_wanted(graph)
        back = [_backward(task, wanted[task.name]) for task in reversed(graph.tasks) if _differentiated(task)]
        return Graph.of([*graph.tasks, *back])


def _differentiated(task: Task) -> bool:
    """Return whether the task has a backward: a transfer of values without gradients has none."""
    spec = spec_of(task.op)
    carries = spec.saves or not task.inputs or not task.inputs.keys() <= spec.given
    return spec.backward is Backward.TASK and carries


def _gradients_wanted(graph: Graph) -> dict[Name, dict[str, tuple[Name, ...]]]:
    """Return for every task, by role, the tasks that make gradients of its outputs."""
    wanted: dict[Name, dict[str, tuple[Name, ...]]] = defaultdict(dict)
    for task in graph.tasks:
        spec = spec_of(task.op)
        if spec.backward is Backward.NONE:
            continue
        source = task.name if spec.backward is Backward.VALUE else task.name.back
        for role, names in task.inputs.items():
            if role not in spec.given:
                for name in names:
                    roles = wanted[name]
                    roles[f"d_{role}"] = (*roles.get(f"d_{role}", ()), source)
    return wanted


def _backward(task: Task, wanted: dict[str, tuple[Name, ...]]) -> Task:
    spec = spec_of(task.op)
    inputs = dict(wanted)
    if spec.saves:
        inputs["saved"] = (task.name,)
    else:
        inputs |= {role: names for role, names in task.inputs.items() if role in spec.given}
    read = tuple(gradients_of(state) for state in task.reads if "parameters" in state)
    state = read or spec.states(task.layer)
    return Task(task.name.back, task.lane, task.axes, inputs, task.cut, accumulates=state, reads=task.reads)
