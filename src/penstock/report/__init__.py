"""Text and pictures for people: timelines, descriptions of schedules, the summary of a run. Without torch."""

from penstock.report.schedule import ScheduleDescription, describe_schedule
from penstock.report.summary import RunSummary
from penstock.report.timeline import duration_text, render_timeline

__all__ = [
    "RunSummary",
    "ScheduleDescription",
    "describe_schedule",
    "duration_text",
    "render_timeline",
]
