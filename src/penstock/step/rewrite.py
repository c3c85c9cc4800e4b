"""What a pass is, in which order passes run, and the tools of which they are made.

A pass is graph in, graph out; its stage says when it may run. The order matters: cutting before the transpose
would give the backward the forward's chunks, and gradient pieces before weight gradients would reduce what is
not complete. Tools put a task on an edge or after a task, cut tasks into pieces, and end a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol

from penstock.graph import Cut, Graph, Name, RefusalError, ScheduleError, Task
from penstock.ops.core import Hop


class Stage(IntEnum):
    """When a pass runs. Passes of one stage run in the order in which they are given, own ones last.

    A pass of one's own at GRADIENTS finds the step with its updates.
    """

    INSERT = 0
    TRANSPOSE = 1
    MICROBATCHES = 2
    CHUNKS = 3
    SLICES = 4
    WEIGHTS = 5
    GRADIENTS = 6
    UPDATES = 7
    SETTLE = 8


class Pass(Protocol):
    """A rewriting of a graph. Frozen, because steps are compared and cached by passes; named for messages."""

    @property
    def name(self) -> str: ...

    @property
    def stage(self) -> Stage: ...

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph rewritten. Raises ScheduleError with the reason where that is impossible."""
        ...


def check_passes(passes: Sequence[Any]) -> None:
    """Raise ScheduleError for an object that is no pass, or a pass that cannot be hashed."""
    for item in passes:
        named = isinstance(getattr(item, "name", None), str)
        if not (named and callable(item) and isinstance(getattr(item, "stage", None), Stage)):
            raise ScheduleError(
                f"{item!r} is no pass: it needs a name, a stage of Stage, and to be called with a graph"
            )
        try:
            hash(item)
        except TypeError as error:
            raise ScheduleError(
                f"pass {item.name} cannot be hashed ({error}), and steps are kept by their passes: make it a "
                "frozen dataclass"
            ) from error


def run(graph: Graph, passes: Sequence[Pass]) -> Graph:
    """Run passes in this order.

    Raises:
        RefusalError: For a pass that could not rewrite the graph, which it names.
    """
    for rewrite in passes:
        try:
            rewritten = rewrite(graph)
        except ScheduleError as error:
            raise RefusalError(f"pass {rewrite.name}: {error}") from error
        if not isinstance(rewritten, Graph):
            raise ScheduleError(
                f"pass {rewrite.name} returned {type(rewritten).__name__}: it must return a Graph"
            )
        graph = rewritten
    return graph


def in_order(passes: Sequence[Pass], own: Sequence[Pass] = ()) -> tuple[Pass, ...]:
    """Return passes sorted by stage.

    Args:
        own: Custom passes, which run last in their stage.

    Raises:
        ScheduleError: For two passes of one name.
    """
    seen: set[str] = set()
    for rewrite in (*passes, *own):
        if rewrite.name in seen:
            raise ScheduleError(f"pass {rewrite.name} stands twice: systems combine each pass once")
        seen.add(rewrite.name)
    placed = [(rewrite.stage, rewrite) for rewrite in passes]
    placed += [
        (Stage.UPDATES if rewrite.stage is Stage.GRADIENTS else rewrite.stage, rewrite) for rewrite in own
    ]
    return tuple(rewrite for _, rewrite in sorted(placed, key=lambda pair: pair[0]))


# ---- tools of passes ---------------------------------------------------------------------------------------

Axis = Literal["microbatch", "chunk", "piece"]
Names = tuple[Name, ...]


def require(graph: Graph, op: str, role: str = "") -> None:
    """Raise ScheduleError unless the graph has tasks of `op`, which all read `role` if one is given."""
    tasks = [task for task in graph.tasks if task.op == op]
    if not tasks:
        raise ScheduleError(f"the step has no task {op}")
    if role and (without := [task for task in tasks if role not in task.inputs]):
        raise ScheduleError(f"{without[0]} has no input {role}; it reads {', '.join(without[0].inputs)}")


def changed(graph: Graph, ops: Collection[str], change: Callable[[Task], Task]) -> Graph:
    """Return the graph with the tasks of `ops` changed."""
    return Graph.of(change(task) if task.op in ops else task for task in graph.tasks)


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
