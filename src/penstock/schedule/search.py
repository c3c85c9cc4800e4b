"""Better orders than any rule gives: other priorities first, then simulated annealing of the order itself.

A rule considers ready tasks only. Whether it pays to finish one microbatch first, or to let a lane wait for a
task that the whole step waits for, shows many tasks later; simulating the whole step reveals it. Priorities
change much of an order at once, and no lane waits. Annealing changes little, and lanes may wait: only a
change where a critical path waits for its lane can shorten a step, so no other change is tried (van
Laarhoven, Aarts and Lenstra, Job Shop Scheduling by Simulated Annealing, 1992).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.graph import Graph, Task
from penstock.schedule.schedule import Schedule
from penstock.schedule.total_order import Row, Timed, TotalOrder, Waits
from penstock.timing import Cost, ListScheduler, lanes_of, slowest

PLAYS = 5
"""Changes of an order per change of priorities, which takes longer to simulate."""

LARGEST_GROUP = 8
WHOLE_KIND = 0.3
"""How often all tasks that differ only in microbatch and chunk move together; else a few move separately."""

RUNS, LEAST_RUN = 3, 2500
"""The most falls of the temperature, each from the best order so far, and the least trials of one."""

HOTTEST = 0.8
"""How much longer a step may become at first, roughly, as a part of a mean task."""

FURTHER, IN_EVERY_LAYER, ANOTHER_PATH = 0.3, 0.25, 0.1
"""How often a change passes one more task, is made in all layers, and, rejected, ends work on a path."""

NEAR = 3
"""Layers of a step, in tasks: pairs farther from each other in a row were not placed by one choice."""


def search(
    name: str, graph: Graph, cost: Cost, starts: Sequence[Mapping[Task, float]], trials: int
) -> Schedule:
    """Return the best order that `trials` changes find, from the best list schedule with `starts`.

    starts: priorities in seconds, smaller first. The same graph and costs give the same order on every rank:
    the random numbers have a fixed seed, and there is no time limit.
    """
    seconds, rng = [slowest(cost(task)) for task in graph.tasks], random.Random(0)
    scheduler, total_order = ListScheduler(graph, seconds), TotalOrder(graph, seconds)
    # The best list schedule with these priorities and with changes of the best ones.
    plays = ([start[task] for task in graph.tasks] for start in starts)
    listed, keys = min(((scheduler.play(each), each) for each in plays), key=lambda each: each[0].seconds)
    by_kind: dict[object, list[int]] = {}  # tasks that differ only in microbatch and chunk, by position
    for position, task in enumerate(graph.tasks):
        by_kind.setdefault((task.layer, task.op, task.phase), []).append(position)
    kinds, step_s = list(by_kind.values()), 2 * sum(seconds) / len(seconds)
    for _ in range(trials // PLAYS):
        # Priorities of a few tasks are shifted by different amounts, or those of a kind by one amount.
        moved = keys.copy()
        if rng.random() < WHOLE_KIND:
            shift_s = rng.gauss(0, step_s)
            for position in rng.choice(kinds):
                moved[position] += shift_s
        else:
            for _ in range(rng.randint(1, LARGEST_GROUP)):
                moved[rng.randrange(len(keys))] += rng.gauss(0, step_s)
        found = scheduler.play_below(moved, listed.seconds)
        if found is not None and found.seconds <= listed.seconds:  # an equal one, too: it may lead on
            listed, keys = found, moved
    best = total_order.timed(listed.orders)
    changes = _Changes(graph, total_order, rng)
    runs = max(1, min(RUNS, trials // LEAST_RUN))
    for _ in range(runs):
        best = min(best, _anneal(best, changes, trials // runs), key=lambda each: each.seconds)
    return Schedule(name, lanes_of(graph, total_order.orders(best.row)))


def _anneal(start: Timed, changes: _Changes, trials: int) -> Timed:
    """Return the best order found while the temperature falls once."""
    total_order, rng = changes.total_order, changes.rng
    best = now = start
    hottest_s = HOTTEST * sum(total_order.seconds) / len(total_order.seconds)
    changes.begin(now)
    for trial in range(trials):
        if not changes.waits.pairs:  # nothing on the path waits for a lane
            break
        heat_s = hottest_s * (1 - trial / trials) ** 2
        most_s = now.seconds - heat_s * math.log(1 - rng.random())
        row, first = changes.draw()
        after = None if row is None else total_order.again(now, row, first, most_s)
        if after is not None:
            now = after
            best = min(best, now, key=lambda each: each.seconds)
        if after is not None or rng.random() < ANOTHER_PATH:
            changes.begin(now)
    return best


@dataclass
class _Changes:
    """The possible changes of an order."""

    graph: Graph
    total_order: TotalOrder
    rng: random.Random

    def __post_init__(self) -> None:
        self._alike: dict[object, dict[int, int]] = {}
        for position, task in enumerate(self.graph.tasks):
            self._alike.setdefault(task.name._replace(layer=0), {})[task.layer] = position
        self._layers = 1 + max(task.layer for task in self.graph.tasks)

    def begin(self, timed: Timed) -> None:
        """Draw changes of this order from now on."""
        self._row, self._place = timed.row, [0] * len(timed.row)
        for place, task in enumerate(timed.row):
            self._place[task] = place
        self.waits: Waits = self.total_order.waits(timed, self.rng)

    def draw(self) -> tuple[Row | None, int]:
        """Return another row, and the place of its first change; None for what dependencies do not allow."""
        first, second = self.rng.choice(self.waits.pairs)
        while self.waits.before[first] >= 0 and self.rng.random() < FURTHER:
            first = self.waits.before[first]
        move = self.total_order.hold if self.rng.random() < 0.5 else self.total_order.advance
        if self.rng.random() >= IN_EVERY_LAYER:
            return move(self._row, self._place[first], self._place[second]), self._place[first]
        row, changed = self._row, len(self._row)
        # The pairs of tasks, by layer, that correspond to this pair.
        firsts, seconds = (self._alike[self.graph.tasks[x].name._replace(layer=0)] for x in (first, second))
        apart = self.graph.tasks[second].layer - self.graph.tasks[first].layer
        far = NEAR * len(self._row) / self._layers
        pairs = [(one, seconds[layer + apart]) for layer, one in firsts.items() if layer + apart in seconds]
        near = [(one, two) for one, two in pairs if 0 < self._place[two] - self._place[one] < far]
        for one, other in near:
            here, there = row.index(one), row.index(other)
            moved = move(row, here, there) if here < there else None
            row, changed = (row, changed) if moved is None else (moved, min(changed, here))
        return (None if row is self._row else row), changed
