"""The list scheduler in plain numbers: rules are frozen with it, and a search plays it thousands of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from penstock.graph import Graph, Lane, Task

Keys = list[float]
"""A priority for every task of the graph by its position; the smallest that is ready on a lane starts."""

ROUNDING = 1e-9
"""Sums of the same seconds in different orders differ by less than this part of themselves."""


@dataclass(frozen=True)
class Found:
    """An order per lane as positions in the graph, and the seconds that the iteration takes with it."""

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
        found = self.play_below(keys, inf)
        assert found is not None, "every order takes less than for ever"
        return found

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
    """Return the tasks at these positions, for every lane that has any."""
    return {lane: tuple(graph.tasks[i] for i in orders[n]) for n, lane in enumerate(Lane) if orders[n]}
