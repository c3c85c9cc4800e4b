"""Measures a cluster, and a model on it."""

from penstock.autopilot.profiling.links import measure_links
from penstock.autopilot.profiling.measure import (
    MeasuredTasks,
    measure_tasks,
    measured_links,
    profile_run,
    rates_with_links,
)

__all__ = [
    "MeasuredTasks",
    "measure_links",
    "measure_tasks",
    "measured_links",
    "profile_run",
    "rates_with_links",
]
