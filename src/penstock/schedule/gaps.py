"""Gradient reductions in chosen gaps of the backward pass; everything else in program order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.decision import TAIL, Slot
from penstock.graph import Graph, Lane, Phase, ScheduleError, Task
from penstock.ops import Op
from penstock.schedule.room import ordered
from penstock.schedule.schedule import Schedule
from penstock.schedule.system import is_all_reduce, lateness


def dense_gap(layer: int) -> Slot:
    """Return the gap under attention of a layer; below layer 0 there is only the tail."""
    return Slot(layer=layer, part="dense") if layer >= 0 else TAIL


def reduce_in_gaps(name: str, graph: Graph, gaps: Mapping[Slot, Sequence[Task]]) -> Schedule:
    """Return a step in program order whose reductions run in their gaps. gaps: every reduction once.

    Raises ScheduleError for a gap between all-to-alls in a layer that has no all-to-alls.
    """
    chunked = {task.layer for task in graph.tasks if task.chunk is not None}
    for slot in gaps:
        if slot.part == "moe" and slot.layer not in chunked:
            raise ScheduleError(f"layer {slot.layer} is dense: there is no gap between its all-to-alls")
    tasks = [task for task in graph.tasks if not lateness(task)]
    lanes = {lane: [task for task in tasks if task.lane is lane] for lane in Lane}
    # A layer's dense gap ends where the next MoE layer's all-to-alls below it begin.
    inter: list[Task] = []
    left = dict(gaps)
    above = 1 + max(task.layer for task in graph.tasks)  # gaps of this layer and of higher ones are passed
    for task in lanes[Lane.INTER]:
        if task.phase is Phase.BACKWARD and task.op == Op.COMBINE:
            for layer in reversed(range(task.layer + 1, above)):
                inter += left.pop(Slot(layer=layer, part="dense"), ())
            above = task.layer + 1
        if task.phase is Phase.BACKWARD and task.op == Op.DISPATCH:
            inter += left.pop(Slot(layer=task.layer, part="moe"), ())
        inter.append(task)
    for layer in reversed(range(above)):
        inter += left.pop(Slot(layer=layer, part="dense"), ())
    lanes[Lane.INTER] = [*inter, *left.pop(TAIL, ())]
    assert not left, f"no such gaps: {list(left)}"
    for task in graph.tasks:  # the optimiser's tasks, which follow the sums of gradients
        if lateness(task) and not is_all_reduce(task):
            lanes[task.lane].append(task)
    return ordered(name, graph, lanes)
