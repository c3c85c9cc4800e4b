"""What of a step runs on a pipeline stage: halves of its graph, and two of different microbatches as one.

The halves of a step on a stage are apart: what a backward reads was made long before, so edges between them
are cut. The names of a forward and a backward task differ, so one graph can hold both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.features.sharded_optimizer.ops import of_optimizer
from penstock.graph import Graph, Task
from penstock.ops import spec_of
from penstock.schedule.schedule import Schedule
from penstock.schedule.system import is_all_reduce, lateness


@dataclass(frozen=True, kw_only=True)
class Half:
    """One half of a step on a part of the layers, for one microbatch.

    begins, ends, blocks: whether the part has the embedding, head and loss, and any layers. first: forward
    only, whether sharded parameters are gathered before. sums, updates: backward only, whether gradients are
    summed over ranks, and parameters updated.
    """

    forward: bool
    begins: bool
    ends: bool
    blocks: bool = True
    first: bool = False
    sums: bool = False
    updates: bool = False

    def of(self, graph: Graph) -> list[Task]:
        """Return the tasks of this half, which read each other alone."""
        kept = [task for task in graph.tasks if self._has(task)]
        known, found = {task.name for task in kept}, []
        for task in kept:
            inputs = {
                role: inside
                for role, names in task.inputs.items()
                if (inside := tuple(name for name in names if name in known))
            }
            found.append(task.reading(inputs))
        return found

    def _has(self, task: Task) -> bool:
        spec = spec_of(task.op)
        place = spec.place
        if place == "input":
            is_here = self.begins
        elif place == "output" or (task.forward and spec.once):
            is_here = self.ends
        else:
            is_here = self.blocks or lateness(task) > 0 or of_optimizer(task) != ""
        if task.forward is not self.forward or not is_here:
            return False
        if self.forward:
            return self.first or not of_optimizer(task)
        if is_all_reduce(task):
            return self.sums
        return self.updates or not lateness(task)


def in_order(schedule: Schedule, tasks: Iterable[Task]) -> Schedule:
    """Return the order of a step for some of its tasks."""
    own = {task.name: task for task in tasks}
    lanes = {
        lane: tuple(own[task.name] for task in order if task.name in own)
        for lane, order in schedule.lanes.items()
    }
    return Schedule(schedule.name, {lane: order for lane, order in lanes.items() if order})
