"""`TaskRecord`: one task that ran, or would have run, on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph import Lane, Task


@dataclass(frozen=True)
class TaskRecord:
    """When a task occupied its lane, in seconds from the start of the step on that rank."""

    task: Task
    rank: int
    start_s: float
    end_s: float
    step: int = 0

    @property
    def lane(self) -> Lane:
        return self.task.lane

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s
