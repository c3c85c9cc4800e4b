"""The tools of passes: put a task on an edge, put one after a task, cut tasks into pieces, end a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.graph import Cut, Graph, Name, ScheduleError, Task
from penstock.ops.core import Hop

Axis = Literal["microbatch", "chunk", "piece"]
Names = tuple[Name, ...]


def require(graph: Graph, op: str, role: str = "") -> None:
    """Raise ScheduleError unless the graph has tasks of `op`, which all read `role` if one is given."""
    tasks = [task for task in graph.tasks if task.op == op]
    if not tasks:
        raise ScheduleError(f"the step has no task {op}")
    if role and (without := [task for task in tasks if role not in task.inputs]):
        raise ScheduleError(f"{without[0]} has no input {role}; it reads {', '.join(without[0].inputs)}")


def insert_before(graph: Graph, op: str, role: str, make: Callable[[Task, Names], Task]) -> Graph:
    """Put a task on the edge `role` of every `op`.

    Args:
        make: Makes the new task from the reader and from what it read.
    """
    require(graph, op, role)
    out: list[Task] = []
    for task in graph.tasks:
        if task.op == op:
            out.append(between := make(task, task.inputs[role]))
            task = task.reading({**task.inputs, role: (between.name,)})  # noqa: PLW2901
        out.append(task)
    return Graph.of(out)


def insert_after(graph: Graph, op: str, role: str, make: Callable[[Task], Task]) -> Graph:
    """Put a task after every `op`, on the edges of all that read its output `role`.

    Args:
        make: Makes the new task from the one that it follows.
    """
    require(graph, op)
    moved: dict[Name, Name] = {}
    out: list[Task] = []
    for task in graph.tasks:
        if role in task.inputs and any(name in moved for name in task.inputs[role]):
            read = tuple(moved.get(name, name) for name in task.inputs[role])
            task = task.reading({**task.inputs, role: read})  # noqa: PLW2901
        out.append(task)
        if task.op == op:
            out.append(after := make(task))
            moved[task.name] = after.name
    return Graph.of(out)


@dataclass(frozen=True)
class Beside:
    """Makes tasks of a hop that move the rows of other tasks, with the same route and cut."""

    hop: Hop

    def before(self, task: Task, rows: Names) -> Task:
        name = task.name._replace(op=self.hop.op)
        inputs = {"rows": rows, "route": task.inputs["route"]}
        return Task(name, self.hop.lane, self.hop.axes, inputs, task.cut)

    def after(self, task: Task) -> Task:
        return self.before(task, (task.name,))


def split(graph: Graph, axis: Axis, pieces: Callable[[Task], int], cut: Callable[[Task, int], Cut]) -> Graph:
    """Cut tasks into pieces. An edge between two cut tasks joins pieces that overlap, every other edge all.

    So equal numbers connect one to one, and 3 chunks forward with 2 backward connect as their intervals do.

    Args:
        pieces: Returns how many pieces a task is cut into; 0 = it is not cut along this axis.
        cut: Returns the cut of one piece of a task.
    """
    number = {task.name: pieces(task) for task in graph.tasks}
    named = {name: _pieces(name, axis, count) for name, count in number.items()}
    out: list[Task] = []
    for task in graph.tasks:
        of = number[task.name]
        try:
            read = {role: [(number[n], named[n]) for n in names] for role, names in task.inputs.items()}
        except KeyError as missing:
            raise ScheduleError(f"{task} reads {missing.args[0]}, which is not in the graph") from None
        for index, name in enumerate(named[task.name]):
            inputs: dict[str, Names] = {}
            for role, ends in read.items():
                sources: list[Name] = []
                for count, names in ends:
                    if not (of and count):
                        sources += names
                    elif of == count:
                        sources.append(names[index])
                    else:  # from the first that ends after this piece begins to the last before its end
                        sources += names[index * count // of : -(-(index + 1) * count // of)]
                inputs[role] = tuple(sources)
            held = cut(task, index)
            state = task.accumulates, task.reads, task.writes
            out.append(Task(name, task.lane, task.axes, inputs, held, *state))
    return Graph.of(out)


def _pieces(name: Name, axis: Axis, count: int) -> Names:
    if not count:
        return (name,)
    place = Name._fields.index(axis)
    return tuple([Name._make((*name[:place], i, *name[place + 1 :])) for i in range(count)])


def end_layers(graph: Graph, added: Mapping[int, Sequence[Task]]) -> Graph:
    """Put tasks at the end of the backward half of their layers."""
    last = {task.layer: i for i, task in enumerate(graph.tasks) if not task.forward}
    if missing := [layer for layer, tasks in added.items() if tasks and layer not in last]:
        raise ScheduleError(f"layer {missing[0]} has no backward: transpose the step first")
    out: list[Task] = []
    for i, task in enumerate(graph.tasks):
        out.append(task)
        if last.get(task.layer) == i:
            out += added.get(task.layer, ())
    return Graph.of(out)
