"""Tasks and graphs of tasks."""

from penstock.graph.graph import Graph
from penstock.graph.task import Cut, Lane, Name, Phase, RefusalError, ScheduleError, Task

__all__ = [
    "Cut",
    "Graph",
    "Lane",
    "Name",
    "Phase",
    "RefusalError",
    "ScheduleError",
    "Task",
]
