"""The longest path through a graph whose lanes are ordered: the one timing rule of the system.

A task starts when its dependencies and the task before it on its lane have ended. The simulator applies this
rule with fitted seconds and one entry per rank; a schedule's picture applies it with one slot per task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from penstock.graph.task import Lane, ScheduleError, Task

T = TypeVar("T")


class Interval(NamedTuple, Generic[T]):
    """The start and the end of a task."""

    start: T
    end: T


class Clock(Protocol[T]):
    """How times are compared and added: plain numbers, or arrays with one entry per rank."""

    def zero(self) -> T: ...

    def latest(self, first: T, second: T) -> T: ...

    def end(self, task: Task, start: T) -> T: ...


class SlotClock:
    """A clock on which every task takes one slot; plain integers."""

    def zero(self) -> int:
        return 0

    def latest(self, first: int, second: int) -> int:
        return max(first, second)

    def end(self, task: Task, start: int) -> int:
        del task
        return start + 1


def longest_path(
    lanes: Mapping[Lane, Sequence[Task]],
    needs: Callable[[Task], Sequence[Task]],
    clock: Clock[T],
) -> dict[Task, Interval[T]]:
    """Return the start and end of every task. Raises ScheduleError naming tasks that wait for each other."""
    times: dict[Task, Interval[T]] = {}
    lane_free: dict[Lane, T] = {lane: clock.zero() for lane in lanes}
    for task in issue_order(lanes, needs):
        start = lane_free[task.lane]
        for need in needs(task):
            start = clock.latest(start, times[need].end)
        times[task] = Interval(start, clock.end(task, start))
        lane_free[task.lane] = times[task].end
    return times


def issue_order(
    lanes: Mapping[Lane, Sequence[Task]], needs: Callable[[Task], Sequence[Task]]
) -> Iterator[Task]:
    """Merge the lanes into one order in which every task stands after its dependencies.

    The order is a function of the lanes alone, hence the same on all ranks.
    """
    heads = dict.fromkeys(lanes, 0)
    done: set[Task] = set()
    remaining = sum(len(order) for order in lanes.values())
    while remaining:
        progress = remaining
        for lane, order in lanes.items():
            while heads[lane] < len(order) and all(n in done for n in needs(order[heads[lane]])):
                task = order[heads[lane]]
                done.add(task)
                heads[lane] += 1
                remaining -= 1
                yield task
        if progress == remaining:
            break
    stuck = []
    for lane, order in lanes.items():
        if heads[lane] < len(order):
            task = order[heads[lane]]
            missing = ", ".join(str(n) for n in needs(task) if n not in done)
            stuck.append(f"{lane}: {task} waits for {missing}")
    if stuck:
        raise ScheduleError("the schedule deadlocks; " + "; ".join(stuck))


def slot_order(
    orders: Sequence[Sequence[int]],
    links: Sequence[Sequence[int]],
    tasks: Sequence[Task],
    *,
    halves: bool = True,
) -> list[int]:
    """Return all positions in the order in which tasks start where each takes one slot, as in a picture.

    One thread that hands out all tasks takes this order. Forward tasks come first: the other half of a step
    is handed out when its loss is asked for gradients. halves: whether it is so. A task stands after what it
    needs; one for which lanes wait in a circle is left out. orders: see `path_ends`.
    """
    found: list[int] = []
    place, slots = {lane: number for number, lane in enumerate(Lane)}, [1.0] * len(tasks)
    lane_of, ends = [place[task.lane] for task in tasks], [inf] * len(tasks)
    for now in ((True,), (False,)) if halves else ((True, False),):
        half = [[i for i in order if tasks[i].forward in now] for order in orders]
        ends = path_ends(half, links, slots, ends)
        begun = (i for order in half for i in order if ends[i] < inf)
        found += sorted(begun, key=lambda i: (ends[i], lane_of[i]))
        for i in found:
            ends[i] = 0.0
    return found


def path_ends(
    orders: Sequence[Sequence[int]],
    links: Sequence[Sequence[int]],
    seconds: Sequence[float],
    known: Sequence[float] = (),
) -> list[float]:
    """Return when every task ends, by its position in a graph: `longest_path` for plain numbers.

    orders: for every lane the positions of its tasks. known: the ends of tasks that are on no lane, and `inf`
    for the others. A task for which lanes wait in a circle never ends: its end is `inf`.
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
