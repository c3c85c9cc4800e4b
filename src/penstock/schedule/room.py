"""Fixed orders in which gradients make room for others: sums are moved to where a task waits for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from penstock.features.sharded_optimizer.passes import ROOM
from penstock.graph import Graph, Lane, Task
from penstock.ops.gradients import summed
from penstock.schedule.schedule import Schedule
from penstock.timing import advance, positions


def ordered(name: str, graph: Graph, lanes: Mapping[Lane, Sequence[Task]]) -> Schedule:
    """Return the schedule of these orders; where no lane could proceed, the sums waited for come first."""
    found = {lane: tuple(order) for lane, order in lanes.items() if order}
    if not any(ROOM in task.inputs for task in graph.tasks):
        return Schedule(name, found)
    left = {lane: order[::-1] for lane, order in positions(found, graph).items()}  # the next one is last
    done = set[int]()
    row = advance(left.values(), graph.links, done)
    while any(left.values()) and _make_room(left.values(), graph, done):
        row += advance(left.values(), graph.links, done)
    for order in left.values():  # none, or a deadlock of another kind, which the schedule's check names
        row += order[::-1]
    tasks = [graph.tasks[place] for place in row]
    return Schedule(name, {lane: tuple(task for task in tasks if task.lane is lane) for lane in found})


def _make_room(left: Collection[list[int]], graph: Graph, done: set[int]) -> bool:
    """Put the sums that some lane waits for, and that could run, at the front of their lanes."""
    tasks = graph.tasks
    wanted = {name for order in left if order for name in tasks[order[-1]].inputs.get(ROOM, ())}
    moved = False
    for order in left:
        sums = [i for i in order if tasks[i].name in wanted and done.issuperset(graph.links[i])]
        assert all(summed(tasks[i].op) for i in sums), "sums make room"
        for place in sums:
            order.remove(place)
            order.append(place)
            moved = True
    return moved
