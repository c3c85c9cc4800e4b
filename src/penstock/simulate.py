"""Simulation of schedules: the longest path with one time per rank, and a bound that no schedule can beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from penstock.cost import Issuing
from penstock.graph import Graph, Interval, Lane, Task, longest_path
from penstock.graph.paths import Clock, path_ends, slot_order
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

    seconds: Mapping[Task, float]

    def zero(self) -> float:
        return 0.0

    def latest(self, first: float, second: float) -> float:
        return first if first >= second else second

    def end(self, task: Task, start: float) -> float:
        return start + self.seconds[task]


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
    if any(isinstance(each, np.ndarray) for each in seconds.values()):
        clock = _RankClock(seconds.__getitem__, mesh)
        return Timeline(_times(schedule, graph, clock, seconds.__getitem__, issuing), mesh)
    alike = _times(schedule, graph, _AlikeClock(seconds), seconds.__getitem__, issuing)
    times = np.array(list(alike.values()), dtype=np.float64).reshape(-1, 2, 1)
    shown = np.broadcast_to(times, (len(times), 2, mesh.world_size))  # no copy per rank
    return Timeline({task: Interval(*both) for task, both in zip(alike, shown, strict=True)}, mesh)


def _times(
    schedule: Schedule, graph: Graph, clock: Clock[Any], cost: RankCost, issuing: Issuing | None
) -> dict[Task, Interval[Any]]:
    """Return the start and the end of every task."""
    if issuing is None:
        return longest_path(schedule.lanes, graph.needs.__getitem__, clock)
    times: dict[Task, Interval[Any]] = {}
    free = {lane: clock.zero() for lane in schedule.lanes}
    host = clock.zero()
    for task in slot_order(schedule.lanes, graph.needs.__getitem__):
        ready = free[task.lane]
        for need in graph.needs[task]:
            ready = clock.latest(ready, times[need].end)
            if not need.lane.is_issued or issuing.reads(need):
                host = clock.latest(host, times[need].end)
        start = clock.latest(ready, host)
        if task.lane.is_issued:  # others have a thread of their own
            host = host + issuing.seconds(task)
            start = clock.latest(start, host - cost(task))  # it ends after its last operation was issued
        times[task] = Interval(start, clock.end(task, start))
        free[task.lane] = times[task].end
    return times


def iteration_s(
    schedule: Schedule,
    graph: Graph,
    cost: RankCost,
    mesh: Mesh | None = None,
    issuing: Issuing | None = None,
) -> float:
    """Return the seconds of a simulated iteration, as `simulate` would; faster, as no timeline is made."""
    seconds = [cost(task) for task in graph.tasks]
    if issuing is not None or any(isinstance(each, np.ndarray) for each in seconds):
        known = dict(zip(graph.tasks, seconds, strict=True))
        return simulate(schedule, graph, known.__getitem__, mesh, issuing).iteration_s
    return max(path_ends(schedule.places(graph), graph.links, seconds))


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
