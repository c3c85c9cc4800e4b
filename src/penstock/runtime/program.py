"""A compiled step plan: a flat list of calls per lane, with numbered slots for what they hand on.

What a task waits for, reads, leaves and frees is worked out once, when a plan is adopted. While a step runs,
nothing is looked up by name, and a lane asks another only where a value or an order really comes from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from penstock.graph import Graph, Lane, Name, Task
from penstock.mesh import Axes
from penstock.ops import Op
from penstock.runtime.calls import MOST_KEPT, Call, Span
from penstock.runtime.features.recompute.handlers import handlers_of
from penstock.runtime.handlers import Handler, Handlers, check_handlers
from penstock.schedule import StepPlan
from penstock.timing import issue_order

GRADIENT = "d_"


@dataclass(frozen=True)
class Program:
    """Calls by span. slots: their number. shared: by slot with readers on several lanes, how many lanes."""

    spans: tuple[Span, ...]
    slots: int
    shared: Mapping[int, int]


def compile_plan(
    plan: StepPlan,
    handlers: Handlers,
    stops: Sequence[Name],
    silent: Collection[Axes] = (),
    *,
    all: bool = True,
    twice: Handlers = MappingProxyType({}),
) -> Program:
    """Compile `plan` into spans that end with the tasks of `stops`; tasks that depend on the last one follow.

    A span holds the tasks that do not depend on its stop, and the stop. all: include what follows the last
    stop; without it, nothing is kept for readers there. twice: the handlers of tasks that run a second time,
    and of their second run, where they differ from `handlers`. silent: kinds of groups of one rank; a lane
    that has no other tasks runs on the compute lane, where it costs no switch of threads. Raises
    ScheduleError for a task that no handler can run.
    """
    check_handlers(plan.graph.tasks, {**handlers, **twice})
    number: dict[Task, int] = {}  # of stops that must have run before a task
    stop_numbers = {name: i for i, name in enumerate(stops)}
    for task in plan.graph.tasks:
        number[task] = max(
            (max(number[need], stop_numbers.get(need.name, -1) + 1) for need in plan.graph.needs[task]),
            default=0,
        )
    kept = [task for task in plan.graph.tasks if all or number[task] < len(stops)]
    handler_of = handlers_of(kept, handlers, twice if all else {})
    lanes = _lanes(plan, kept, silent)
    slots = _slots(kept)
    # Of every slot its last reader on every lane that reads it.
    place = {task: (lane, i) for lane, order in lanes.items() for i, task in enumerate(order)}
    readers: dict[int, dict[Lane, Task]] = defaultdict(dict)
    for task in kept:
        lane, i = place[task]
        for slot in _read(task, slots):
            last = readers[slot].get(lane)
            if last is None or place[last][1] < i:
                readers[slot][lane] = task
    spans = []
    for span in range(len(stops) + all):
        orders = {lane: [t for t in order if number[t] == span] for lane, order in lanes.items()}
        spans.append(_calls(orders, plan.graph, handler_of, slots, readers))
    shared = {slot: len(ends) for slot, ends in readers.items() if len(ends) > 1}
    return Program(tuple(spans), len(slots), shared)


def _lanes(plan: StepPlan, kept: Iterable[Task], silent: Collection[Axes]) -> dict[Lane, list[Task]]:
    """Return the order in which threads run the tasks; silent lanes are merged into the compute lane."""
    wanted, quiet = set(kept), set(silent)
    home = {
        lane: Lane.COMPUTE if all(task.axes in quiet for task in order) else lane
        for lane, order in plan.schedule.lanes.items()
    }
    found: dict[Lane, list[Task]] = {}
    for place in issue_order(plan.schedule.lanes, plan.graph):
        if (task := plan.graph.tasks[place]) in wanted:
            found.setdefault(home[task.lane], []).append(task)
    return found


Slots = Mapping[tuple[Name, str], int]


def _slots(tasks: Iterable[Task]) -> Slots:
    """Return a slot for every output that is read, by the task and the output's name."""
    slots: dict[tuple[Name, str], int] = {}
    for task in tasks:
        for role, names in task.inputs.items():
            for name in names:
                slots.setdefault((name, role.removeprefix(GRADIENT)), len(slots))
    return slots


def _read(task: Task, slots: Slots) -> Iterable[int]:
    return {slots[n, role.removeprefix(GRADIENT)] for role, names in task.inputs.items() for n in names}


def _calls(
    orders: Mapping[Lane, Sequence[Task]],
    graph: Graph,
    handler_of: Mapping[Task, Handler],
    slots: Slots,
    readers: Mapping[int, Mapping[Lane, Task]],
) -> Span:
    place = {task: (lane, i) for lane, order in orders.items() for i, task in enumerate(order)}
    written: dict[Name, list[tuple[str, int]]] = defaultdict(list)
    for (name, output), slot in slots.items():
        written[name].append((output, slot))
    span: dict[Lane, tuple[Call, ...]] = {}
    for lane, order in orders.items():
        known: dict[Lane, int] = {}
        calls = []
        for task in order:
            waits = _waits(task, lane, graph, place, known)
            ended = [slot for slot in _read(task, slots) if readers[slot][lane] is task]
            calls.append(
                Call(
                    task,
                    handler_of[task],
                    tuple(
                        (role, tuple(slots[name, role.removeprefix(GRADIENT)] for name in names))
                        for role, names in task.inputs.items()
                    ),
                    tuple(written[task.name]),
                    tuple(slot for slot in ended if len(readers[slot]) == 1),
                    tuple(slot for slot in ended if len(readers[slot]) > 1),
                    waits,
                )
            )
        span[lane] = tuple(calls)
    return span


def _waits(
    task: Task, lane: Lane, graph: Graph, place: Mapping[Task, tuple[Lane, int]], known: dict[Lane, int]
) -> tuple[tuple[Lane, int], ...]:
    """Return how far other lanes must be, unless an earlier task of this lane has waited for that already."""
    wanted: dict[Lane, int] = {}
    for need in graph.needs[task]:
        if need in place:
            other, i = place[need]
            if other is not lane and i + 1 > known.get(other, 0):
                wanted[other] = max(wanted.get(other, 0), i + 1)
    known.update(wanted)
    return tuple(wanted.items())


class Programs:
    """Compiled plans, each made when it is first asked for. silent: kinds of groups of one rank. twice: see
    `compile_plan`."""

    def __init__(
        self, handlers: Handlers, silent: Collection[Axes], twice: Handlers = MappingProxyType({})
    ) -> None:
        self._handlers, self._silent, self._twice = handlers, silent, twice
        self._known: dict[tuple[int, bool], tuple[StepPlan, Program]] = {}

    def of(self, plan: StepPlan, *, training: bool) -> Program:
        """Return the program for training or forward alone. Raises ScheduleError for a missing handler."""
        key = id(plan), training
        if key not in self._known:
            stops = [task.name for task in plan.graph.tasks if task.op == Op.STATISTICS]
            if len(self._known) >= MOST_KEPT:
                self._known.pop(next(iter(self._known)))
            program = compile_plan(plan, self._handlers, stops, self._silent, all=training, twice=self._twice)
            self._known[key] = plan, program  # kept with the plan, or another could get its id
        return self._known[key][1]
