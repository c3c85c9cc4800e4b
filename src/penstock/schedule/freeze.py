"""The list scheduler: a priority rule, run on simulated time, frozen into a static order.

Serving a priority queue while training would let two ranks choose different orders, and collectives would
then deadlock (already with a difference of 0.5 % in speed). Therefore the rule is applied here, once, to
predicted durations; the result is data, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.graph import Graph, Task
from penstock.schedule.list_scheduler import ListScheduler, lanes_of
from penstock.schedule.schedule import Schedule

Cost = Callable[[Task], Any]
"""Seconds of a task: a number, or an array with one entry per rank."""

Priority = Callable[[Task], tuple[float, ...]]
"""A key for each task: among tasks that are ready on a lane, the one with the smallest key starts."""


def freeze(name: str, graph: Graph, cost: Cost, priority: Priority) -> Schedule:
    """Run `priority` on the simulated timeline and return the resulting order.

    A lane never idles while one of its tasks is ready. A rank's slowness does not change the order:
    each task takes the time of its slowest rank. Cost: O(tasks log tasks).
    """
    seconds = [slowest(cost(task)) for task in graph.tasks]
    wanted = sorted(range(len(graph.tasks)), key=lambda i: (*priority(graph.tasks[i]), i))
    keys = [0.0] * len(wanted)
    for place, position in enumerate(wanted):  # one number replaces the whole key
        keys[position] = place
    return Schedule(name, lanes_of(graph, ListScheduler(graph, seconds).play(keys).orders))


def slowest(seconds: Any) -> float:
    """Return one number for all ranks: the slowest rank's."""
    return float(seconds.max()) if hasattr(seconds, "max") else float(seconds)


def fastest(seconds: Any) -> float:
    """Return one number for all ranks: the fastest rank's."""
    return float(seconds.min()) if hasattr(seconds, "min") else float(seconds)
