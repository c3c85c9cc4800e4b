"""The list scheduler: a priority rule, run on simulated time, frozen into a static order.

Serving a priority queue while training would let two ranks choose different orders, and collectives then
deadlock (with 0.5 % difference in speed already). So the rule is applied here, once, to predicted
durations; what comes out is data, the same on all ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

from penstock.graph import Graph, Lane, Task
from penstock.schedule.schedule import Schedule

Cost = Callable[[Task], Any]
"""Seconds of a task: a number, or an array with one entry per rank."""

Priority = Callable[[Task], tuple[float, ...]]
"""Among tasks that are ready on a lane, the one with the smallest key starts."""


def freeze(name: str, graph: Graph, cost: Cost, priority: Priority) -> Schedule:
    """Run `priority` on the simulated timeline and return the order it gives.

    A lane never idles while one of its tasks is ready. A rank's slowness does not change the order:
    each task takes the time of its slowest rank. Cost: O(tasks log tasks).
    """
    return _ListScheduler(graph, cost, priority).run(name)


class _ListScheduler:
    """The state of one run: tasks that are ready per lane, and tasks that are running."""

    def __init__(self, graph: Graph, cost: Cost, priority: Priority) -> None:
        self.graph, self.cost = graph, cost
        self.keys = {task: (*priority(task), graph.position[task]) for task in graph.tasks}
        self.missing = {task: len(graph.needs[task]) for task in graph.tasks}
        self.ready: Mapping[Lane, list[tuple[tuple[float, ...], Task]]] = {lane: [] for lane in Lane}
        self.running: list[tuple[float, int, Task]] = []
        self.busy: set[Lane] = set()
        self.order: dict[Lane, list[Task]] = {lane: [] for lane in Lane}

    def run(self, name: str) -> Schedule:
        for task, missing in self.missing.items():
            if missing == 0:
                self._make_ready(task)
        self._start_idle_lanes(0.0)
        while self.running:
            now = self.running[0][0]
            while self.running and self.running[0][0] <= now:
                self._finish(heapq.heappop(self.running)[2])
            self._start_idle_lanes(now)
        return Schedule(name, {lane: tuple(order) for lane, order in self.order.items() if order})

    def _make_ready(self, task: Task) -> None:
        heapq.heappush(self.ready[task.lane], (self.keys[task], task))

    def _finish(self, task: Task) -> None:
        self.busy.discard(task.lane)
        for reader in self.graph.readers[task]:
            self.missing[reader] -= 1
            if self.missing[reader] == 0:
                self._make_ready(reader)

    def _start_idle_lanes(self, now_s: float) -> None:
        for lane, ready in self.ready.items():
            if ready and lane not in self.busy:
                _, task = heapq.heappop(ready)
                self.order[lane].append(task)
                self.busy.add(lane)
                end_s = now_s + slowest(self.cost(task))
                heapq.heappush(self.running, (end_s, self.graph.position[task], task))


def slowest(seconds: Any) -> float:
    """One number for all ranks: the slowest rank's."""
    return float(seconds.max()) if hasattr(seconds, "max") else float(seconds)
