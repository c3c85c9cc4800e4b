"""The errors of graphs and schedules that are found wrong before they run."""


class ScheduleError(ValueError):
    """A task name, a graph or a schedule that cannot be right. The message names the task."""


class RefusalError(ScheduleError):
    """A request of a decision that this step cannot fulfil. The message says why."""
