"""When tasks run: the one timing rule of the system, its simulation, and bounds that no schedule can beat.

A task starts when the tasks that it reads and the task before it on its lane have ended. Tasks are meant by
their positions in a graph: a search times orders by the thousand, and numbers are far quicker to compare than
tasks. Seconds are plain numbers where ranks are alike, and arrays [ranks] where they differ; there a
collective ends for its whole group at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from penstock.graph import Graph, Lane, ScheduleError, Task
from penstock.mesh import Mesh, Seconds
from penstock.ops import OPS

T = TypeVar("T")

Cost = Callable[[Task], Any]
"""Seconds of a task: one number for all ranks, or an array [ranks]."""

Orders = Mapping[Lane, Sequence[int]]
"""For every lane the positions of its tasks."""

Links = Sequence[Sequence[int]]
"""By position of a task, the positions of other tasks: of those that it reads, or of its readers."""


class Ordered(Protocol):
    """The order of tasks on every lane; see `Schedule`."""

    @property
    def lanes(self) -> Mapping[Lane, tuple[Task, ...]]: ...


def slowest(seconds: Any) -> float:
    """Return one number for all ranks: the slowest rank's."""
    return float(seconds.max()) if hasattr(seconds, "max") else float(seconds)


def fastest(seconds: Any) -> float:
    """Return one number for all ranks: the fastest rank's."""
    return float(seconds.min()) if hasattr(seconds, "min") else float(seconds)


# ---- one row of all tasks ----------------------------------------------------------------------------------


def positions(lanes: Mapping[Lane, Sequence[Task]], graph: Graph) -> dict[Lane, list[int]]:
    """Return the positions of the tasks of every lane."""
    at = graph.position
    return {lane: [at[task] for task in order] for lane, order in lanes.items()}


def advance(left: Collection[list[int]], links: Links, done: set[int]) -> list[int]:
    """Take from every lane in turn as many tasks as can run; return them in that order.

    Args:
        left: The tasks of every lane, the next one last.
        links: By task, those that it reads.
        done: The tasks that have run; more are added.
    """
    row: list[int] = []
    before = -1
    while before < len(row):
        before = len(row)
        for lane in left:
            while lane and done.issuperset(links[lane[-1]]):
                row.append(task := lane.pop())
                done.add(task)
    return row


def issue_order(lanes: Mapping[Lane, Sequence[Task]], graph: Graph) -> list[int]:
    """Merge the lanes into one row in which every task stands after those that it reads.

    The row is a function of the lanes alone, hence the same on all ranks.

    Raises:
        ScheduleError: For tasks that wait for each other, which it names.
    """
    left = {lane: order[::-1] for lane, order in positions(lanes, graph).items()}
    done = set[int]()
    row = advance(left.values(), graph.links, done)
    stuck = []
    for lane, order in left.items():
        if order:
            missing = ", ".join(str(graph.tasks[need]) for need in graph.links[order[-1]] if need not in done)
            stuck.append(f"{lane}: {graph.tasks[order[-1]]} waits for {missing}")
    if stuck:
        raise ScheduleError("the schedule deadlocks; " + "; ".join(stuck))
    return row


def slot_order(orders: Orders, links: Links, forward: Sequence[bool] = ()) -> list[int]:
    """Return all positions in the order in which tasks start where each takes one slot, as in a picture.

    One thread that hands out all tasks takes this order. A task stands after what it reads; one for which
    lanes wait in a circle is left out.

    Args:
        orders: The positions of the tasks of every lane.
        links: By task, those that it reads.
        forward: By position, whether the task is handed out before all others, since the other half of a step
            begins when its loss is asked for gradients; empty = all tasks are handed out as they come.
    """
    row: list[int] = []
    ends, slots = [inf] * len(links), [1.0] * len(links)
    lane_of = {place: number for number, lane in enumerate(Lane) for place in orders.get(lane, ())}
    for now in (True, False) if forward else (True,):
        half = [[i for i in order if not forward or forward[i] is now] for order in orders.values()]
        ends = path_ends(half, links, slots, ends)
        begun = (i for order in half for i in order if ends[i] < inf)
        row += sorted(begun, key=lambda i: (ends[i], lane_of[i]))
        for i in row:
            ends[i] = 0.0
    return row


def ready_order(links: Links, readers: Links) -> list[int]:
    """Return all tasks, each after those that it reads, in the order in which they become ready."""
    missing = [len(needs) for needs in links]
    row = [task for task, count in enumerate(missing) if not count]
    for task in row:  # the row grows during the iteration
        for reader in readers[task]:
            missing[reader] -= 1
            if not missing[reader]:
                row.append(reader)
    return row


# ---- paths -------------------------------------------------------------------------------------------------


def earliest(links: Links, seconds: Sequence[float], begin_s: Sequence[float] = ()) -> list[float]:
    """Return when every task ends, if every lane could run everything at once.

    Args:
        links: By task, those that it reads, which stand before it.
        begin_s: When every task may begin at the earliest; `-inf` where only what it reads counts.
    """
    ends: list[float] = []
    for needs, took_s, begin in zip(links, seconds, begin_s or [0.0] * len(links), strict=True):
        ends.append(max([begin, *[ends[need] for need in needs]]) + took_s)
    return ends


def tail(readers: Links, seconds: Sequence[float]) -> list[float]:
    """Return the seconds after the end of every task, along the longest chain of its readers."""
    after_s = [0.0] * len(seconds)
    for task in reversed(range(len(seconds))):
        after_s[task] = max([seconds[reader] + after_s[reader] for reader in readers[task]], default=0.0)
    return after_s


def path_ends(
    orders: Collection[Sequence[int]], links: Links, seconds: Sequence[float], known: Sequence[float] = ()
) -> list[float]:
    """Return when every task ends, where ranks are alike.

    A task for which lanes wait in a circle never ends: its end is `inf`.

    Args:
        orders: The positions of the tasks of every lane.
        links: By task, those that it reads.
        known: The ends of tasks that are on no lane, and `inf` for the others.
    """
    ends = list(known) or [inf] * len(links)
    free_s, heads = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for lane, order in enumerate(orders):
            first, end_s = heads[lane], free_s[lane]
            for task in order[first:]:
                start_s = max([end_s, *[ends[need] for need in links[task]]])
                if start_s == inf:
                    break
                ends[task] = end_s = start_s + seconds[task]
                heads[lane] += 1
            free_s[lane] = end_s
            moved = moved or heads[lane] > first
    return ends


def path_starts(orders: Collection[Sequence[int]], links: Links, ends: Sequence[float]) -> list[float]:
    """Return when every task starts, from the ends of all.

    Starts are not computed from a task's own end: rounding would put it before one that it reads.
    """
    starts = [max([0.0, *[ends[need] for need in needs]]) for needs in links]
    for order in orders:
        for before, task in pairwise(order):
            starts[task] = max(starts[task], ends[before])
    return starts


# ---- list scheduling ---------------------------------------------------------------------------------------

Keys = list[float]
"""A priority for every task by its position; the smallest that is ready on a lane starts."""

ROUNDING = 1e-9
"""Sums of the same seconds in different orders differ by less than this part of themselves."""


@dataclass(frozen=True)
class Found:
    """An order for every lane, in the order of `Lane`, and the seconds that the iteration takes with it."""

    seconds: float
    orders: tuple[list[int], ...]


class ListScheduler:
    """A graph in plain numbers: a simulated iteration takes about half a microsecond per task."""

    def __init__(self, graph: Graph, seconds: Sequence[float]) -> None:
        lanes = {lane: number for number, lane in enumerate(Lane)}
        self.seconds = seconds
        self.lane = [lanes[task.lane] for task in graph.tasks]
        self.readers = graph.readers_at
        self.needs = [len(needs) for needs in graph.links]
        self.work_s = [0.0 for _ in Lane]
        for task, lane in enumerate(self.lane):
            self.work_s[lane] += seconds[task]

    def play(self, keys: Keys) -> Found:
        """Return the list schedule: an idle lane at once starts its ready task with the smallest key."""
        best = self.play_below(keys, inf)
        assert best is not None, "every order takes less than for ever"
        return best

    def play_below(self, keys: Keys, most_s: float) -> Found | None:
        """Return what `play` returns; None as soon as a lane has too much work left to end by `most_s`."""
        missing, lane_of, readers, seconds = self.needs.copy(), self.lane, self.readers, self.seconds
        latest_s = [most_s * (1 + ROUNDING) - work_s for work_s in self.work_s]
        ready: list[list[tuple[float, int]]] = [[] for _ in Lane]
        orders: tuple[list[int], ...] = tuple([] for _ in Lane)
        idle, now_s = [True for _ in Lane], 0.0
        running: list[tuple[float, int]] = []
        for task, count in enumerate(missing):
            if count == 0:
                heappush(ready[lane_of[task]], (keys[task], task))
        while True:
            for lane, queue in enumerate(ready):
                if queue and idle[lane]:
                    if now_s > latest_s[lane]:
                        return None
                    task = heappop(queue)[1]
                    idle[lane] = False
                    orders[lane].append(task)
                    latest_s[lane] += seconds[task]
                    heappush(running, (now_s + seconds[task], task))
            if not running:
                return Found(now_s, orders)
            now_s = running[0][0]
            while running and running[0][0] <= now_s:
                task = heappop(running)[1]
                idle[lane_of[task]] = True
                for reader in readers[task]:
                    missing[reader] -= 1
                    if missing[reader] == 0:
                        heappush(ready[lane_of[reader]], (keys[reader], reader))


def lanes_of(graph: Graph, orders: Sequence[Sequence[int]]) -> dict[Lane, tuple[Task, ...]]:
    """Return the tasks at these positions, for every lane that has any.

    Args:
        orders: The positions of every lane's tasks, in the order of `Lane`.
    """
    return {lane: tuple(graph.tasks[i] for i in orders[n]) for n, lane in enumerate(Lane) if orders[n]}


# ---- simulation --------------------------------------------------------------------------------------------


class Interval(NamedTuple, Generic[T]):
    """The start and the end of a task."""

    start: T
    end: T


@dataclass(frozen=True)
class TaskRecord:
    """When a task occupied its lane, or would have, in seconds from the start of the step on that rank."""

    task: Task
    rank: int
    start_s: float
    end_s: float
    step: int = 0

    @property
    def lane(self) -> Lane:
        return self.task.lane

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """Start and end of every task on every rank: arrays [ranks], seconds."""

    times: dict[Task, Interval[Seconds]]
    mesh: Mesh

    @property
    def iteration_s(self) -> float:
        return max(float(interval.end.max()) for interval in self.times.values())

    def stretched(self, factor: float) -> Timeline:
        """Return this timeline with every moment `factor` times as late."""
        times = {task: Interval(factor * span.start, factor * span.end) for task, span in self.times.items()}
        return Timeline(times, self.mesh)

    def records(self) -> list[TaskRecord]:
        """Return the records that a measured run of this timeline would emit."""
        return [
            TaskRecord(task, rank, float(interval.start[rank]), float(interval.end[rank]))
            for task, interval in self.times.items()
            for rank in range(self.mesh.world_size)
        ]


@dataclass(frozen=True)
class Issuing:
    """The seconds of the one thread that hands out tasks to a GPU.

    On CPUs every lane has a thread of its own. On a GPU one thread hands out the tasks of all lanes, one
    after another, and no task starts before that: where tasks are small, a step takes as long as this thread
    works.

    Attributes:
        task_s: The seconds for each task.
        kernel_s: The seconds for each operation of a task.
        reads_counts: Whether the thread waits for the counts that ranks exchange, before it hands out what
            they size.
        halves: Whether the thread hands out all forward tasks before the first of the other half.
    """

    task_s: float
    kernel_s: float
    reads_counts: bool = True
    halves: bool = True

    def reads(self, task: Task) -> bool:
        """Return whether the thread waits for a task's result: NCCL takes split sizes from the host, when it
        issues the first transfer."""
        return self.reads_counts and OPS[task.op].sizes_transfers

    def seconds(self, task: Task) -> float:
        """Return how long the thread is busy with a task."""
        return self.task_s + OPS[task.op].launches * self.kernel_s


def simulate(
    schedule: Ordered, graph: Graph, cost: Cost, mesh: Mesh | None = None, issuing: Issuing | None = None
) -> Timeline:
    """Return when every task runs. A task starts once its inputs and the task before it on its lane end.

    Args:
        mesh: The ranks; None = there is one.
        issuing: The thread that hands out all tasks; None = every lane has its own.

    Raises:
        ScheduleError: For tasks that wait for each other, which it names.
    """
    mesh, tasks, orders = mesh or Mesh(), graph.tasks, positions(schedule.lanes, graph)
    row, seconds = [place for order in orders.values() for place in order], [0.0] * len(tasks)
    for place in row:
        seconds[place] = cost(tasks[place])
    uneven = _differ(seconds)
    if uneven or issuing is not None:
        row = _row(schedule, graph, orders, issuing)
        starts, ends = _timed(row, graph, seconds, mesh if uneven else None, issuing)
    else:
        ends = path_ends(orders.values(), graph.links, seconds)
        if any(ends[place] == inf for place in row):
            issue_order(schedule.lanes, graph)  # raises
        starts = path_starts(orders.values(), graph.links, ends)
    spans: Any = [(starts[place], ends[place]) for place in row]
    if not uneven:
        times = np.array(spans, dtype=np.float64).reshape(-1, 2, 1)
        spans = np.broadcast_to(times, (len(times), 2, mesh.world_size))  # no copy per rank
    return Timeline({tasks[i]: Interval(*span) for i, span in zip(row, spans, strict=True)}, mesh)


def iteration_s(
    schedule: Ordered, graph: Graph, cost: Cost, mesh: Mesh | None = None, issuing: Issuing | None = None
) -> float:
    """Return the seconds of a simulated iteration, as `simulate` would; faster, as no timeline is made."""
    seconds, orders = [cost(task) for task in graph.tasks], positions(schedule.lanes, graph)
    uneven = _differ(seconds)
    if not uneven and issuing is None:
        return max(path_ends(orders.values(), graph.links, seconds))
    row = _row(schedule, graph, orders, issuing)
    _, ends = _timed(row, graph, seconds, (mesh or Mesh()) if uneven else None, issuing)
    return max(float(end.max()) for end in ends) if uneven else max(ends)


def _differ(seconds: Sequence[Any]) -> bool:
    """Return whether ranks take different times for some task."""
    return any(isinstance(each, np.ndarray) for each in seconds)


def _row(schedule: Ordered, graph: Graph, orders: Orders, issuing: Issuing | None) -> list[int]:
    """Return all tasks in an order in which they can be timed: as one thread hands them out, if one does."""
    if issuing is None:
        return issue_order(schedule.lanes, graph)
    row = slot_order(orders, graph.links, [task.forward for task in graph.tasks] if issuing.halves else ())
    if len(row) < sum(map(len, orders.values())):
        issue_order(schedule.lanes, graph)  # raises
    return row


def _timed(
    row: Sequence[int],
    graph: Graph,
    seconds: Sequence[Any],
    mesh: Mesh | None,
    issuing: Issuing | None = None,
    lanes: Sequence[Any] = (),
) -> tuple[list[Any], list[Any]]:
    """Return when every task starts and ends, by position, in numbers, or in arrays if a mesh is given.

    row: the tasks, each after those that it waits for. lanes: by position, what a task occupies; none = the
    task's own lane.
    """
    tasks, links, latest = graph.tasks, graph.links, max if mesh is None else np.maximum
    zero: Any = 0.0 if mesh is None else np.zeros(mesh.world_size)
    lanes = lanes or [task.lane for task in tasks]
    starts, ends, free, host = [zero] * len(tasks), [zero] * len(tasks), dict.fromkeys(lanes, zero), zero
    issued = {lane for lane in Lane if lane.is_issued}  # others have a thread of their own
    heard = [issuing is not None and (t.lane not in issued or issuing.reads(t)) for t in tasks]
    for place in row:
        start = free[lanes[place]]
        for need in links[place]:
            start = latest(start, ends[need])
            if heard[need]:
                host = latest(host, ends[need])
        if issuing is not None:
            start = latest(start, host)
            if lanes[place] in issued:
                host = host + issuing.seconds(tasks[place])
                start = latest(start, host - seconds[place])  # it ends after its last operation was issued
        end = start + seconds[place]
        starts[place] = start
        ends[place] = free[lanes[place]] = end if mesh is None else mesh.latest(end, tasks[place].axes)
    return starts, ends


# ---- bounds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """No order of the same tasks is faster than the busiest lane or the critical path. Seconds."""

    busiest_lane: Lane
    busiest_lane_s: float
    critical_path_s: float

    @property
    def seconds(self) -> float:
        return max(self.busiest_lane_s, self.critical_path_s)

    def times(self, factor: float) -> LowerBound:
        """Return the bound if every task takes `factor` times as long."""
        lane_s, path_s = factor * self.busiest_lane_s, factor * self.critical_path_s
        return replace(self, busiest_lane_s=lane_s, critical_path_s=path_s)


def lower_bound(graph: Graph, cost: Cost, mesh: Mesh | None = None) -> LowerBound:
    """Return the bound for every schedule of this graph; each lane's work is that of its slowest rank."""
    by_task, every = {task: cost(task) for task in graph.tasks}, range(len(graph.tasks))
    busy, seconds = lane_work(by_task), list(by_task.values())
    busiest = max(busy, key=lambda lane: busy[lane])
    if _differ(seconds):
        _, ends = _timed(every, graph, seconds, mesh or Mesh(), lanes=every)
        path_s = max(float(end.max()) for end in ends)
    else:
        path_s = max(earliest(graph.links, seconds))
    return LowerBound(busiest_lane=busiest, busiest_lane_s=busy[busiest], critical_path_s=path_s)


def lane_work(seconds: Mapping[Task, Any]) -> dict[Lane, float]:
    """Return the seconds of work on every lane, on the rank that has most work there."""
    work: dict[Lane, Any] = {}
    for task, task_s in seconds.items():
        lane = task.lane
        work[lane] = work.get(lane, 0.0) + task_s
    return {lane: float(np.max(total)) for lane, total in work.items()}


def overlap_efficiency(bound: LowerBound, iteration_s: float) -> float:
    """Return the lower bound divided by the iteration time: 1.0 is a schedule that cannot be improved."""
    return bound.seconds / iteration_s if iteration_s > 0 else 1.0
