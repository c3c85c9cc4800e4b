"""All tasks of a step in one row, which gives an order for every lane: any order, not only a scheduler's.

The list scheduler starts whatever is ready. Here a task is placed where the row puts it, so a lane may wait
for a task that is about to be ready although another one could start: in job-shop scheduling such orders are
needed for the shortest time (Baker, Introduction to Sequencing and Scheduling: a best schedule may be a delay
schedule).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from penstock.graph import Graph, Lane
from penstock.timing import path_ends, path_starts, ready_order, tail

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
    """The places where a critical path waits for a lane alone. pairs: two tasks of one lane, of which the
    second waits for the first only because of the order. before: by position, the previous task on the same
    lane; -1 = none."""

    pairs: list[tuple[int, int]]
    before: list[int]


class TotalOrder:
    """A graph in plain numbers, to time rows. seconds: by position."""

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
        """Time a row equal to `was` before place `first`. None as soon as it must take longer than most_s."""
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

        None if the later task depends on the earlier one.
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

        None if the later task depends on the earlier one.
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
