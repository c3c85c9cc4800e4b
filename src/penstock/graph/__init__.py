"""Tasks, the one dependency rule, and the graph of an iteration. Pure Python: no torch."""

from penstock.graph.build import Graph, build_graph
from penstock.graph.dependencies import dependencies
from penstock.graph.errors import ScheduleError
from penstock.graph.paths import Interval, longest_path
from penstock.graph.shape import StepShape
from penstock.graph.task import Group, Lane, Op, Phase, Task

__all__ = [
    "Graph",
    "Group",
    "Interval",
    "Lane",
    "Op",
    "Phase",
    "ScheduleError",
    "StepShape",
    "Task",
    "build_graph",
    "dependencies",
    "longest_path",
]
