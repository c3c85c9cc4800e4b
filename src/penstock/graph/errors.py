"""The error of everything that is wrong with a graph or a schedule, before it runs."""


class ScheduleError(ValueError):
    """A task name, a graph or a schedule that cannot be right. The message names the task."""


class RefusalError(ScheduleError):
    """What a decision asks of a step, and this step cannot have. The message says why."""
