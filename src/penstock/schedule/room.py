"""Fixed orders in which gradients make room for others: sums are moved to where a task waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.features.sharded_optimizer.passes import ROOM
from penstock.graph import Graph, Lane, Name, Task
from penstock.ops.gradients import summed
from penstock.schedule.schedule import Schedule


def ordered(name: str, graph: Graph, lanes: Mapping[Lane, Sequence[Task]]) -> Schedule:
    """Return the schedule of these orders; where no lane could proceed, the sums waited for come first."""
    found = {lane: tuple(order) for lane, order in lanes.items() if order}
    if not any(ROOM in task.inputs for task in graph.tasks):
        return Schedule(name, found)
    left = {lane: list(reversed(order)) for lane, order in found.items()}  # the next one is last
    made: dict[Lane, list[Task]] = {lane: [] for lane in found}
    done: set[Name] = set()
    while any(left.values()):
        ready = [lane for lane, order in left.items() if order and _is_ready(order[-1], done)]
        for lane in ready:
            task = left[lane].pop()
            made[lane].append(task)
            done.add(task.name)
        if not ready and not _make_room(left, done):
            break  # a deadlock of another kind, which the schedule's check names
    return Schedule(name, {lane: (*made[lane], *reversed(left[lane])) for lane in found})


def _make_room(left: Mapping[Lane, list[Task]], done: set[Name]) -> bool:
    """Put the sums that some lane waits for, and that could run, at the front of their lanes."""
    wanted = {name for order in left.values() if order for name in order[-1].inputs.get(ROOM, ())}
    moved = False
    for order in left.values():
        sums = [task for task in order if task.name in wanted and _is_ready(task, done)]
        assert all(summed(task.op) is not None for task in sums), "sums make room"
        for task in sums:
            order.remove(task)
            order.append(task)
            moved = True
    return moved


def _is_ready(task: Task, done: set[Name]) -> bool:
    return all(name in done for name in task.sources())
