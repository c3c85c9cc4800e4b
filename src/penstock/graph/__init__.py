"""Tasks and graphs of tasks, and the longest path through them."""

from penstock.graph.graph import Graph
from penstock.graph.paths import Interval, longest_path
from penstock.graph.task import Cut, Lane, Name, Phase, RefusalError, ScheduleError, Task

__all__ = [
    "Cut",
    "Graph",
    "Interval",
    "Lane",
    "Name",
    "Phase",
    "RefusalError",
    "ScheduleError",
    "Task",
    "longest_path",
]
