"""Simulation of schedules: the longest path with one time per rank, and a bound that no schedule can beat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import numpy as np

from penstock.cost import Issuing
from penstock.graph import Graph, Interval, Lane, Task, longest_path
from penstock.graph.paths import Clock, issue_order, path_ends, slot_order
from penstock.mesh import Mesh, Seconds
from penstock.schedule import Schedule
from penstock.trace.records import TaskRecord

T = TypeVar("T")

RankCost = Callable[[Task], Any]
"""Seconds of a task: one number for all ranks, or an array [ranks]."""


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
class _RankClock:
    """A clock whose times are arrays [ranks]; a collective ends for its whole group at once."""

    cost: RankCost
    mesh: Mesh

    def zero(self) -> Seconds:
        return np.zeros(self.mesh.world_size)

    def latest(self, first: Seconds, second: Seconds) -> Seconds:
        return np.maximum(first, second)

    def end(self, task: Task, start: Seconds) -> Seconds:
        return self.mesh.latest(start + self.cost(task), task.axes)


@dataclass(frozen=True)
class _AlikeClock:
    """A clock for ranks that all take the same time for every task, so that one number stands for all."""

    cost: RankCost

    def zero(self) -> float:
        return 0.0

    def latest(self, first: float, second: float) -> float:
        return first if first >= second else second

    def end(self, task: Task, start: float) -> float:
        seconds: float = self.cost(task)
        return start + seconds


def simulate(
    schedule: Schedule,
    graph: Graph,
    cost: RankCost,
    mesh: Mesh | None = None,
    issuing: Issuing | None = None,
) -> Timeline:
    """Return when every task runs. A task starts once its inputs and the task before it on its lane end.

    issuing: of the thread that hands out all tasks; None = every lane has its own.
    """
    mesh = mesh or Mesh()
    seconds = {task: cost(task) for order in schedule.lanes.values() for task in order}
    known = seconds.__getitem__
    if any(isinstance(each, np.ndarray) for each in seconds.values()):
        clock = _RankClock(known, mesh)
        if issuing is None:
            return Timeline(longest_path(schedule.lanes, graph.needs.__getitem__, clock), mesh)
        return Timeline(dict(_issued(schedule, graph, clock, known, issuing)), mesh)
    if issuing is None:
        alike = _alike(schedule, graph, seconds)
    else:
        alike = dict(_issued(schedule, graph, _AlikeClock(known), known, issuing))
    times = np.array(list(alike.values()), dtype=np.float64).reshape(-1, 2, 1)
    shown = np.broadcast_to(times, (len(times), 2, mesh.world_size))  # no copy per rank
    return Timeline({task: Interval(*both) for task, both in zip(alike, shown, strict=True)}, mesh)


def _alike(schedule: Schedule, graph: Graph, seconds: Mapping[Task, float]) -> dict[Task, Interval[float]]:
    """Return the start and the end of every task, where ranks are alike and every lane has its own thread.

    Starts are not computed from ends: rounding would put a task before one that it reads.
    """
    orders, times = schedule.places(graph), dict[Task, Interval[float]]()
    ends = path_ends(orders, graph.links, [seconds.get(task, 0.0) for task in graph.tasks])
    _check_ends(schedule, graph, sum(end < inf for end in ends))
    for order in orders:
        free = 0.0
        for place in order:
            start = max([free, *[ends[need] for need in graph.links[place]]])
            times[graph.tasks[place]] = Interval(start, free := ends[place])
    return times


def _issued(
    schedule: Schedule, graph: Graph, clock: Clock[Any], cost: RankCost, issuing: Issuing
) -> Iterator[tuple[Task, Interval[Any]]]:
    """Yield every task with its start and its end, where one thread hands out those of all lanes."""
    tasks, ends = graph.tasks, [clock.zero()] * len(graph.tasks)
    order = slot_order(schedule.places(graph), graph.links, tasks, halves=issuing.halves)
    _check_ends(schedule, graph, len(order))
    heard = [not task.lane.is_issued or issuing.reads(task) for task in tasks]
    free, host = {lane: clock.zero() for lane in schedule.lanes}, clock.zero()
    for place in order:
        task = tasks[place]
        ready = free[task.lane]
        for need in graph.links[place]:
            ready = clock.latest(ready, ends[need])
            if heard[need]:
                host = clock.latest(host, ends[need])
        start = clock.latest(ready, host)
        if task.lane.is_issued:  # others have a thread of their own
            host = host + issuing.seconds(task)
            start = clock.latest(start, host - cost(task))  # it ends after its last operation was issued
        ends[place] = free[task.lane] = clock.end(task, start)
        yield task, Interval(start, ends[place])


def _check_ends(schedule: Schedule, graph: Graph, ended: int) -> None:
    """Raise ScheduleError naming tasks that wait for each other, if fewer ended than the schedule has."""
    if ended < sum(map(len, schedule.lanes.values())):
        for _ in issue_order(schedule.lanes, graph.needs.__getitem__):
            pass


def iteration_s(
    schedule: Schedule,
    graph: Graph,
    cost: RankCost,
    mesh: Mesh | None = None,
    issuing: Issuing | None = None,
) -> float:
    """Return the seconds of a simulated iteration, as `simulate` would; faster, as no timeline is made."""
    seconds = [cost(task) for task in graph.tasks]
    if any(isinstance(each, np.ndarray) for each in seconds):
        known = dict(zip(graph.tasks, seconds, strict=True))
        return simulate(schedule, graph, known.__getitem__, mesh, issuing).iteration_s
    if issuing is None:
        return max(path_ends(schedule.places(graph), graph.links, seconds))
    return _issued_s(schedule, graph, seconds, issuing)


def _issued_s(schedule: Schedule, graph: Graph, seconds: Sequence[float], issuing: Issuing) -> float:
    """Return the end of the last task, as `_issued` has it, where ranks are alike: in plain numbers."""
    tasks, links, ends = graph.tasks, graph.links, [0.0] * len(graph.tasks)
    order = slot_order(schedule.places(graph), links, tasks, halves=issuing.halves)
    _check_ends(schedule, graph, len(order))
    free, host_s, last_s = dict.fromkeys(Lane, 0.0), 0.0, 0.0
    heard = [not task.lane.is_issued or issuing.reads(task) for task in tasks]
    for place in order:
        task, own_s = tasks[place], seconds[place]
        lane = task.lane
        start_s = free[lane]
        for need in links[place]:
            end_s = ends[need]
            start_s = max(start_s, end_s)
            if heard[need] and end_s > host_s:
                host_s = end_s
        start_s = max(start_s, host_s)
        if lane.is_issued:
            host_s += issuing.seconds(task)
            start_s = max(start_s, host_s - own_s)
        ends[place] = free[lane] = end_s = start_s + own_s
        last_s = max(last_s, end_s)
    return last_s


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


def lower_bound(graph: Graph, cost: RankCost, mesh: Mesh | None = None) -> LowerBound:
    """Return the bound for every schedule of this graph; each lane's work is that of its slowest rank."""
    seconds = {task: cost(task) for task in graph.tasks}
    uneven = any(isinstance(each, np.ndarray) for each in seconds.values())
    busy = lane_work(seconds)
    busiest = max(busy, key=lambda lane: busy[lane])
    if uneven:
        path_s = _critical_path(graph, _RankClock(seconds.__getitem__, mesh or Mesh()))
    else:
        path_s = max(chain_ends(graph, list(seconds.values())))
    return LowerBound(busiest_lane=busiest, busiest_lane_s=busy[busiest], critical_path_s=path_s)


def chain_ends(graph: Graph, seconds: Sequence[float]) -> list[float]:
    """Return when every task ends, by its position, if every lane could run everything at once."""
    ends: list[float] = []
    for needs, each in zip(graph.links, seconds, strict=True):
        ends.append(max([0.0, *[ends[need] for need in needs]]) + each)
    return ends


def lane_work(seconds: Mapping[Task, Any]) -> dict[Lane, float]:
    """Return the seconds of work on every lane, on the rank that has most work there."""
    work: dict[Lane, Any] = {}
    for task, each in seconds.items():
        lane = task.lane
        work[lane] = work.get(lane, 0.0) + each
    return {lane: float(np.max(total)) for lane, total in work.items()}


def _critical_path(graph: Graph, clock: Clock[T]) -> float:
    """Return the length of the longest chain of dependencies, where ranks take different times."""
    ends: dict[Task, T] = {}
    for task in graph.tasks:
        start = clock.zero()
        for need in graph.needs[task]:
            start = clock.latest(start, ends[need])
        ends[task] = clock.end(task, start)
    return max(float(np.max(np.asarray(end))) for end in ends.values())


def overlap_efficiency(bound: LowerBound, iteration_s: float) -> float:
    """Return the lower bound divided by the iteration time: 1.0 is a schedule that cannot be improved."""
    return bound.seconds / iteration_s if iteration_s > 0 else 1.0
