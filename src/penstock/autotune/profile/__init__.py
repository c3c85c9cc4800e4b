"""Measures a cluster, and a model on it."""

from penstock.autotune.profile.links import measure_links
from penstock.autotune.profile.measure import (
    profile_layout,
    profile_links,
    profile_run,
    profile_schedules,
    rates_with_links,
)
from penstock.autotune.profile.tasks import measure_tasks

__all__ = [
    "measure_links",
    "measure_tasks",
    "profile_layout",
    "profile_links",
    "profile_run",
    "profile_schedules",
    "rates_with_links",
]
