"""Fixed orders in which gradients make room for others: sums are moved to where a task waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    tasks, moved = graph.tasks, True
    while moved and any(left.values()):
        # The sums that some lane waits for, and that could run, come to the front of their lanes.
        waiting = (tasks[order[-1]] for order in left.values() if order)
        wanted = {name for task in waiting for name in task.inputs.get(ROOM, ())}
        moved = False
        for order in left.values():
            sums = [i for i in order if tasks[i].name in wanted and done.issuperset(graph.links[i])]
            assert all(summed(tasks[i].op) for i in sums), "sums make room"
            for place in sums:
                order.remove(place)
                order.append(place)
                moved = True
        if moved:
            row += advance(left.values(), graph.links, done)
    for order in left.values():  # none, or a deadlock of another kind, which the schedule's check names
        row += order[::-1]
    ran = [tasks[place] for place in row]
    return Schedule(name, {lane: tuple(task for task in ran if task.lane is lane) for lane in found})
