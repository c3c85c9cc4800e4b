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
from functools import cached_property
from math import inf

from penstock.graph import Graph, Lane, Task
from penstock.schedule.schedule import Schedule
from penstock.timing import Cost, ListScheduler, lanes_of, path_ends, path_starts, ready_order, slowest, tail

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

    The same graph and costs give the same order on every rank: the random numbers have a fixed seed, and
    there is no time limit.

    Args:
        starts: The priorities of every task in seconds, smaller first, with which the search begins.
        trials: The number of changes that are simulated.
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
        played = scheduler.play_below(moved, listed.seconds)
        if played is not None and played.seconds <= listed.seconds:  # an equal one, too: it may lead on
            listed, keys = played, moved
    best = total_order.timed(listed.orders)
    changes = _Changes(graph, total_order, rng)
    runs = max(1, min(RUNS, trials // LEAST_RUN))
    hottest_s = HOTTEST * sum(total_order.seconds) / len(total_order.seconds)
    for _ in range(runs):  # in each of which the temperature falls once
        now = best
        changes.begin(now)
        for trial in range(trials // runs):
            if not changes.waits.pairs:  # nothing on the path waits for a lane
                break
            heat_s = hottest_s * (1 - trial / (trials // runs)) ** 2
            most_s = now.seconds - heat_s * math.log(1 - rng.random())
            row, first = changes.draw()
            after = None if row is None else total_order.again(now, row, first, most_s)
            if after is not None:
                now = after
                best = min(best, now, key=lambda each: each.seconds)
            if after is not None or rng.random() < ANOTHER_PATH:
                changes.begin(now)
    return Schedule(name, lanes_of(graph, total_order.orders(best.row)))


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


# ---- all tasks of a step in one row, which gives an order for every lane: any order, not only a
# scheduler's
#
# The list scheduler starts whatever is ready. Here a task is placed where the row puts it, so a lane may wait
# for a task that is about to be ready although another one could start: in job-shop scheduling such orders
# are needed for the shortest time (Baker, Introduction to Sequencing and Scheduling: a best schedule may be a
# delay schedule).


Row = list[int]
"""Positions in the graph: every task once, after those that it reads."""

SAME = 1e-9
"""Ends that differ by less than this part of a step count as one moment."""


@dataclass(frozen=True)
class Timed:
    """A row in the order in which its tasks start, with each task's start and end, by position.

    Starts are kept and not computed from ends: rounding would put a task before one of no length that it
    reads.
    """

    row: Row
    starts_s: list[float]
    ends_s: list[float]

    @cached_property
    def seconds(self) -> float:
        return max(self.ends_s)


@dataclass(frozen=True)
class Waits:
    """The places where a critical path waits for a lane alone.

    Attributes:
        pairs: Two tasks of one lane, of which the second waits for the first only because of the order.
        before: The previous task on the same lane, by position; -1 = there is none.
    """

    pairs: list[tuple[int, int]]
    before: list[int]


class TotalOrder:
    """A graph in plain numbers, to time rows.

    Attributes:
        seconds: The duration of every task, by position.
    """

    def __init__(self, graph: Graph, seconds: Sequence[float]) -> None:
        lanes = {lane: number for number, lane in enumerate(Lane)}
        self.lane = [lanes[task.lane] for task in graph.tasks]
        self.links, self.readers, self.seconds = graph.links, graph.readers_at, seconds
        self.lanes = len(set(self.lane))
        self.program, self.after_s = ready_order(graph.links, self.readers), tail(self.readers, seconds)

    def timed(self, orders: Sequence[Sequence[int]]) -> Timed:
        """Return orders of lanes as a timed row. The orders must not wait for each other in a cycle."""
        ends_s = path_ends(orders, self.links, self.seconds)
        return _timed(self.program, path_starts(orders, self.links, ends_s), ends_s)

    def orders(self, row: Row) -> tuple[list[int], ...]:
        """Return the order that a row gives to every lane."""
        orders: tuple[list[int], ...] = tuple([] for _ in Lane)
        for task in row:
            orders[self.lane[task]].append(task)
        return orders

    def again(self, was: Timed, row: Row, first: int, most_s: float) -> Timed | None:
        """Return the times of a row equal to `was` before `first`; None if it takes more than `most_s`."""
        lane_of, links, seconds, after_s = self.lane, self.links, self.seconds, self.after_s
        starts_s, ends_s = was.starts_s.copy(), was.ends_s.copy()
        free_s, missing = (
            [-inf] * len(Lane),
            self.lanes,
        )  # from when every lane is free for the tasks that follow
        for task in reversed(was.row[:first]):
            if free_s[lane_of[task]] < 0:
                free_s[lane_of[task]] = ends_s[task]
                missing -= 1
                if not missing:
                    break
        free_s = [max(0.0, each) for each in free_s]
        for task in row[first:]:
            lane = lane_of[task]
            start_s = free_s[lane]
            for need in links[task]:
                start_s = need_s if (need_s := ends_s[need]) > start_s else start_s
            end_s = start_s + seconds[task]
            if end_s + after_s[task] > most_s:
                return None
            starts_s[task], ends_s[task] = start_s, end_s
            free_s[lane] = end_s
        return _timed(row, starts_s, ends_s)

    def waits(self, timed: Timed, rng: random.Random) -> Waits:
        """Follow one critical path back from the end; `rng` chooses where several meet."""
        lane_of, links, seconds, bits = self.lane, self.links, self.seconds, rng.getrandbits
        before, last = [-1] * len(timed.row), [-1] * len(Lane)
        for task in timed.row:
            lane = lane_of[task]
            before[task], last[lane] = last[lane], task
        ends_s, pairs = timed.ends_s, list[tuple[int, int]]()
        task, same_s = max(timed.row, key=ends_s.__getitem__), SAME * timed.seconds
        while True:
            begin_s = ends_s[task] - seconds[task] - same_s
            causes = [need for need in links[task] if ends_s[need] >= begin_s]
            first = before[task]
            if first >= 0 and ends_s[first] >= begin_s and first not in causes:
                pairs.append((first, task))
                causes.append(first)
            if not causes:
                return Waits(pairs, before)
            if len(causes) > 1:
                task = rng.choice(causes)
                continue
            while bits(1):  # as `choice` would for one cause, ten times as fast; known orders depend on it
                pass
            task = causes[0]

    def hold(self, row: Row, first: int, second: int) -> Row | None:
        """Move the task at place `first`, and all that depend on it, after that at the later place `second`.

        The result is None if the later task depends on the earlier one.
        """
        waiting, ahead, moved = {row[first]}, list[int](), [row[first]]
        for task in row[first + 1 : second + 1]:
            if waiting.isdisjoint(self.links[task]):
                ahead.append(task)
            else:
                waiting.add(task)
                moved.append(task)
        return None if row[second] in waiting else row[:first] + ahead + moved + row[second + 1 :]

    def advance(self, row: Row, first: int, second: int) -> Row | None:
        """Move the task at place `second`, and all on which it depends, before the task at place `first`.

        The result is None if the later task depends on the earlier one.
        """
        wanted, moved, behind = {row[second]}, [row[second]], list[int]()
        for task in reversed(row[first:second]):
            if wanted.isdisjoint(self.readers[task]):
                behind.append(task)
            else:
                wanted.add(task)
                moved.append(task)
        if row[first] in wanted:
            return None
        return row[:first] + moved[::-1] + behind[::-1] + row[second + 1 :]


def _timed(row: Row, starts_s: list[float], ends_s: list[float]) -> Timed:
    """Return tasks by start, those without work first; ties keep their order in `row`."""
    keys = list(zip(starts_s, ends_s, strict=True))
    return Timed(sorted(row, key=keys.__getitem__), starts_s, ends_s)
