"""Errors of a running step. They name the task, the lane, the rank, and the ranks waited for."""

from __future__ import annotations

from penstock.graph import Task
from penstock.mesh import Group
from penstock.ops import spec_of
from penstock.topology.faults import explain


class TaskError(RuntimeError):
    """A task failed; the step on this rank is stopped. `str()` ends with the grid, the task in >brackets<.

    task: the task that failed first on this rank. rank: this rank. waited_s: how long it had been running.
    """

    def __init__(self, task: Task, rank: int, waited_s: float, cause: BaseException, grid: str) -> None:
        partners = f" with the {Group.name(task.axes)} group" if task.axes else ""
        super().__init__(
            f"rank {rank}: task {task} ({spec_of(task.op).title}) failed on lane {task.lane}{partners} "
            f"after {waited_s:.2f} s: {type(cause).__name__}: {explain(cause)}\n\n{grid}"
        )
        self.task, self.rank, self.waited_s = task, rank, waited_s


class ScheduleMismatchError(RuntimeError):
    """Ranks hold different schedules; running them would deadlock."""


class ParameterMismatchError(RuntimeError):
    """Ranks would train different parameters, so sums of their gradients would be meaningless."""
