"""Better orders than any rule gives: local search over priorities, judged by the simulated iteration.

A rule looks at ready tasks only. Whether it pays to finish one microbatch first, so that the network has
something to send while the others are computed, shows many tasks later; simulating the whole step sees it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from penstock.graph import Graph, Lane, Task
from penstock.schedule.freeze import Cost, slowest
from penstock.schedule.schedule import Schedule

Keys = list[float]
"""A priority for every task of the graph by its position; the smallest that is ready on a lane starts."""

SCENARIOS = ((1.0, 1.0), (1.1, 1.0), (1.0, 1.1))
"""Factors on computation and on transfers: predictions are some percent off, in either direction."""

LARGEST_GROUP = 8
WHOLE_KIND = 0.3


@dataclass(frozen=True)
class Found:
    """An order per lane as positions in the graph, and the seconds that the iteration takes with it."""

    seconds: float
    orders: tuple[list[int], ...]


class Board:
    """A graph in plain numbers: a simulated iteration takes about half a microsecond per task."""

    def __init__(self, graph: Graph, seconds: Sequence[float]) -> None:
        position = graph.position
        self.seconds = seconds
        self.lane = [tuple(Lane).index(task.lane) for task in graph.tasks]
        self.readers = [[position[r] for r in graph.readers[task]] for task in graph.tasks]
        self.needs = [len(graph.needs[task]) for task in graph.tasks]

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


def search(
    name: str, graph: Graph, cost: Cost, starts: Sequence[Mapping[Task, float]], evaluations: int
) -> Schedule:
    """The best order that `evaluations` simulated iterations find, from the best of `starts`.

    starts: priorities in seconds, smaller first. Judged by the sum over SCENARIOS, so that an order which is
    good only if every duration is exactly as predicted does not win. The same graph and costs give the same
    order on every rank: the random numbers have a fixed seed, and there is no time limit.
    """
    seconds, rng = [slowest(cost(task)) for task in graph.tasks], random.Random(0)
    boards = [Board(graph, _scaled(graph, seconds, factors)) for factors in SCENARIOS]

    def judge(keys: Keys) -> float:
        return sum(board.play(keys).seconds for board in boards)

    keys = min(([start[task] for task in graph.tasks] for start in starts), key=judge)
    best_s, kinds = judge(keys), _kinds(graph)
    step_s = 2 * sum(seconds) / len(seconds)
    for _ in range(evaluations // len(boards)):
        moved = _move(keys, kinds, step_s, rng)
        moved_s = judge(moved)
        if moved_s <= best_s:  # an equal one is taken too: it may lead on
            best_s, keys = moved_s, moved
    orders = Board(graph, seconds).play(keys).orders
    lanes = {lane: tuple(graph.tasks[i] for i in orders[n]) for n, lane in enumerate(Lane)}
    return Schedule(name, {lane: order for lane, order in lanes.items() if order})


def _scaled(graph: Graph, seconds: Sequence[float], factors: tuple[float, float]) -> list[float]:
    compute, transfers = factors
    return [
        s * (compute if task.lane is Lane.COMPUTE else transfers)
        for task, s in zip(graph.tasks, seconds, strict=True)
    ]


def _kinds(graph: Graph) -> list[list[int]]:
    """Positions of tasks that differ in microbatch and chunk only."""
    kinds: dict[object, list[int]] = {}
    for position, task in enumerate(graph.tasks):
        kinds.setdefault((task.layer, task.op, task.phase), []).append(position)
    return list(kinds.values())


def _move(keys: Keys, kinds: Sequence[Sequence[int]], step_s: float, rng: random.Random) -> Keys:
    """Shift the priorities of a few tasks, each by its own amount, or of one kind by the same."""
    moved = keys.copy()
    if rng.random() < WHOLE_KIND:
        shift_s = rng.gauss(0, step_s)
        for position in rng.choice(kinds):
            moved[position] += shift_s
        return moved
    for _ in range(rng.randint(1, LARGEST_GROUP)):
        moved[rng.randrange(len(keys))] += rng.gauss(0, step_s)
    return moved
