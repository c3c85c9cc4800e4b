"""`Schedule`: the order of tasks on every lane, with a text form, a hash and a check."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

from penstock.graph import Graph, Lane, Name, ScheduleError, Task
from penstock.graph.paths import issue_order, path_ends
from penstock.schedule.grid import draw


def unit_cost(task: Task) -> float:
    """Return one slot for every task: the cost used for pictures that show order and not seconds."""
    del task
    return 1.0


@dataclass(frozen=True)
class Schedule:
    """Ordered tasks per lane, equal on all ranks; ranks compare `digest` before first use."""

    name: str
    lanes: Mapping[Lane, tuple[Task, ...]]

    def text(self) -> str:
        """Return one line per lane. `Schedule.parse(schedule.text(), graph) == schedule`."""
        lines = [f"schedule {self.name}"]
        lines += [f"{lane}: {' '.join(map(str, order))}" for lane, order in self.lanes.items()]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str, graph: Graph) -> Schedule:
        """Read the text form, with the tasks of `graph`. Raises ScheduleError naming what is wrong."""
        name, orders = parse_orders(text)
        own = graph.by_name
        for lane, order in orders.items():
            if strangers := [task for task in order if task not in own]:
                raise ScheduleError(f"{strangers[0]} is on lane {lane} but not in the graph")
        return Schedule(name, {lane: tuple(own[task] for task in order) for lane, order in orders.items()})

    @cached_property
    def digest(self) -> str:
        """A hash of the text form: two ranks with the same digest run the same order."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def check(self, graph: Graph) -> None:
        """Raise ScheduleError unless every task is once on its own lane, and no lanes wait in a cycle."""
        seen = [False] * len(graph.tasks)
        for lane, order in self.lanes.items():
            for task in order:
                if task not in graph.position:
                    raise ScheduleError(f"{task} is on lane {lane} but not in the graph")
                if task.lane is not lane:
                    raise ScheduleError(f"{task} is on lane {lane}; it runs on lane {task.lane}")
                if seen[graph.position[task]]:
                    raise ScheduleError(f"{task} stands twice in the schedule")
                seen[graph.position[task]] = True
        if missing := [str(task) for task, found in zip(graph.tasks, seen, strict=True) if not found]:
            raise ScheduleError(f"schedule {self.name}: {missing[0]} is missing ({len(missing)} in all)")
        if max(path_ends(self.places(graph), graph.links, [1.0] * len(graph.tasks))) == inf:
            for _ in issue_order(self.lanes, graph.needs.__getitem__):  # raises: says who waits for whom
                pass

    def places(self, graph: Graph) -> list[list[int]]:
        """Return, for every lane, the positions of its tasks in the graph."""
        return [[graph.position[task] for task in order] for order in self.lanes.values()]

    def half(self, *, forward: bool) -> Schedule:
        """Return the forward or the backward part, in the same order: to run, not to draw as a grid."""
        lanes = {lane: tuple(t for t in order if t.forward is forward) for lane, order in self.lanes.items()}
        return Schedule(self.name, lanes)

    def grid(self, graph: Graph, *, width: int = 110, mark: Task | None = None) -> str:
        """Return a picture: lanes as rows, one slot per task; `mark` puts a task into >brackets<."""
        return draw(self.name, self.lanes, graph, width=width, mark=mark)


def parse_orders(text: str) -> tuple[str, dict[Lane, tuple[Name, ...]]]:
    """Return the name and the task names per lane of a text form. Raises ScheduleError naming the line."""
    head, *lines = text.rstrip().splitlines() or [""]
    if not head.startswith("schedule "):
        raise ScheduleError(f"line 1: expected 'schedule NAME', found {head!r}")
    lanes: dict[Lane, tuple[Name, ...]] = {}
    for number, line in enumerate(lines, 2):
        lane, colon, tasks = line.partition(":")
        if not colon or lane not in set(Lane):
            raise ScheduleError(f"line {number}: expected 'LANE: TASK ...', LANE of {', '.join(Lane)}")
        if lane in lanes:
            raise ScheduleError(f"line {number}: lane {lane} stands twice")
        try:
            lanes[Lane(lane)] = tuple(Name.parse(word) for word in tasks.split())
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from None
    return head.removeprefix("schedule ").strip(), lanes
