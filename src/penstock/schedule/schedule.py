"""`Schedule`: the order of tasks on every lane, with a text form, a hash and a check.

A priority rule is frozen into such an order. Serving a priority queue while training would let two ranks
choose different orders, and collectives would then deadlock (already with a difference of 0.5 % in speed).
Therefore the rule is applied here, once, to predicted durations; the result is data, the same on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.graph import Graph, Lane, Name, ScheduleError, Task
from penstock.timing import Cost, ListScheduler, issue_order, lanes_of, simulate, slowest

Priority = Callable[[Task], tuple[float, ...]]
"""A key for each task: among tasks that are ready on a lane, the one with the smallest key starts."""


def unit_cost(task: Task) -> float:
    """Return one slot for every task: the cost used for pictures that show order and not seconds."""
    del task
    return 1.0


@dataclass(frozen=True)
class Schedule:
    """Ordered tasks per lane, equal on all ranks."""

    name: str
    lanes: Mapping[Lane, tuple[Task, ...]]

    def text(self) -> str:
        """Return one line per lane. `Schedule.parse(schedule.text(), graph) == schedule`."""
        lines = [f"schedule {self.name}"]
        lines += [f"{lane}: {' '.join(map(str, order))}" for lane, order in self.lanes.items()]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str, graph: Graph) -> Schedule:
        """Read the text form, with the tasks of `graph`.

        Raises:
            ScheduleError: For text that is no schedule of this graph; it names what is wrong.
        """
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
        if missing := [str(task) for task, present in zip(graph.tasks, seen, strict=True) if not present]:
            raise ScheduleError(f"schedule {self.name}: {missing[0]} is missing ({len(missing)} in all)")
        issue_order(self.lanes, graph)  # raises where lanes wait for each other

    def grid(self, graph: Graph, *, width: int = 110, mark: Task | None = None) -> str:
        """Return a picture: lanes as rows, one slot per task, forward before backward.

        Args:
            width: The most characters of a line.
            mark: The task that stands in >brackets<; None = no task does.
        """
        lanes = [lane for lane, order in self.lanes.items() if order]
        times = simulate(self, graph, unit_cost).times
        starts = {task: int(span.start[0]) for task, span in times.items()}
        slots = {(task.lane, start): task for task, start in starts.items()}
        parts = [f"{self.name}: one column = one slot, {IDLE} = idle"]
        for forward, title in ((True, "forward"), (False, "backward")):
            used = [start for task, start in starts.items() if task.forward is forward]
            if used:
                columns = range(min(used), max(used) + 1)
                parts += [f"{title}", *_rows(columns, lanes, slots, forward, width, mark)]
        return "\n".join(parts) + "\n"


def freeze(name: str, graph: Graph, cost: Cost, priority: Priority) -> Schedule:
    """Run `priority` on the simulated timeline and return the resulting order.

    A lane never idles while one of its tasks is ready. A rank's slowness does not change the order:
    each task takes the time of its slowest rank. Cost: O(tasks log tasks).

    Args:
        priority: Returns the priority of a task; the smallest goes first.
    """
    seconds = [slowest(cost(task)) for task in graph.tasks]
    wanted = sorted(range(len(graph.tasks)), key=lambda i: (*priority(graph.tasks[i]), i))
    keys = [0.0] * len(wanted)
    for place, position in enumerate(wanted):  # one number replaces the whole key
        keys[position] = place
    return Schedule(name, lanes_of(graph, ListScheduler(graph, seconds).play(keys).orders))


def parse_orders(text: str) -> tuple[str, dict[Lane, tuple[Name, ...]]]:
    """Return the name and the task names per lane of a text form.

    Raises:
        ScheduleError: For a line that is no order, which it names.
    """
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


# ---- the picture of a schedule: lanes as rows, time to the right, one column per slot ---------------------
#
# A cell names op, microbatch and chunk (`D0.1`); the row `layer` says which block the compute lane works on.
# All-reduces carry their own layer (`AR3.0`). Columns are slots, not seconds: the picture shows order.


LABEL_WIDTH = 8
IDLE = "·"


def _rows(
    columns: range,
    lanes: list[Lane],
    slots: Mapping[tuple[Lane, int], Task],
    forward: bool,
    width: int,
    mark: Task | None,
) -> list[str]:
    cells: dict[Lane, list[str]] = {lane: [] for lane in lanes}
    layers, current = list[str](), -1
    for column in columns:
        here = {lane: slots.get((lane, column)) for lane in (*lanes, Lane.COMPUTE)}
        here = {lane: task for lane, task in here.items() if task is not None and task.forward is forward}
        for lane in lanes:
            task = here.get(lane)
            shown = IDLE if task is None else f">{task.cell}<" if task == mark else task.cell
            cells[lane].append(shown)
        computed = here.get(Lane.COMPUTE)
        changed = computed is not None and computed.layer != current
        current = computed.layer if computed is not None else current
        layers.append(f"L{current}" if changed else "")
    widths = [max(len(row[i]) for row in [layers, *cells.values()]) for i in range(len(columns))]
    lines: list[str] = []
    room = width - LABEL_WIDTH - 1
    pages, begin, used = [], 0, 0
    for i, cell in enumerate(widths):
        if used + cell > room and i > begin:
            pages.append((begin, i))
            begin, used = i, 0
        used += cell + 1
    for first, last in [*pages, (begin, len(widths))]:
        for label, row in [("layer", layers), *((str(lane), row) for lane, row in cells.items())]:
            text = " ".join(f"{row[i]:<{widths[i]}}" for i in range(first, last))
            lines.append(f"{label:<{LABEL_WIDTH}} {text}".rstrip())
        lines.append("")
    return lines[:-1]
