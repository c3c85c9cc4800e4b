"""The list scheduler in plain numbers: rules are frozen with it, and a search plays it by the thousand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from penstock.graph import Graph, Lane, Task

Keys = list[float]
"""A priority for every task of the graph by its position; the smallest that is ready on a lane starts."""


@dataclass(frozen=True)
class Found:
    """An order per lane as positions in the graph, and the seconds that the iteration takes with it."""

    seconds: float
    orders: tuple[list[int], ...]


class Board:
    """A graph in plain numbers: a simulated iteration takes about half a microsecond per task."""

    def __init__(self, graph: Graph, seconds: Sequence[float]) -> None:
        lanes = {lane: number for number, lane in enumerate(Lane)}
        self.seconds = seconds
        self.lane = [lanes[task.lane] for task in graph.tasks]
        self.readers = graph.readers_at
        self.needs = [len(needs) for needs in graph.links]

    def play(self, keys: Keys) -> Found:
        """The list scheduler: an idle lane starts its ready task with the smallest key at once."""
        missing, lanes = self.needs.copy(), range(len(Lane))
        ready: list[list[tuple[float, int]]] = [[] for _ in lanes]
        orders: tuple[list[int], ...] = tuple([] for _ in lanes)
        idle, now_s = [True for _ in lanes], 0.0
        running: list[tuple[float, int]] = []
        for task, count in enumerate(missing):
            if count == 0:
                heappush(ready[self.lane[task]], (keys[task], task))
        while True:
            for lane in lanes:
                if idle[lane] and ready[lane]:
                    task = heappop(ready[lane])[1]
                    idle[lane] = False
                    orders[lane].append(task)
                    heappush(running, (now_s + self.seconds[task], task))
            if not running:
                return Found(now_s, orders)
            now_s = running[0][0]
            while running and running[0][0] <= now_s:
                self._finish(heappop(running)[1], missing, ready, idle, keys)

    def _finish(
        self,
        task: int,
        missing: list[int],
        ready: list[list[tuple[float, int]]],
        idle: list[bool],
        keys: Keys,
    ) -> None:
        idle[self.lane[task]] = True
        for reader in self.readers[task]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heappush(ready[self.lane[reader]], (keys[reader], reader))


def lanes_of(graph: Graph, orders: Sequence[Sequence[int]]) -> dict[Lane, tuple[Task, ...]]:
    """The tasks at those positions, for every lane that has any."""
    return {lane: tuple(graph.tasks[i] for i in orders[n]) for n, lane in enumerate(Lane) if orders[n]}
