"""What it takes of a rank's one thread to hand tasks to a GPU.

On CPUs every lane has a thread of its own. On a GPU one thread hands out the tasks of all lanes, one after
another, and no task starts before that: where tasks are small, a step takes as long as this thread works.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph import Task
from penstock.ops import OPS


@dataclass(frozen=True)
class Issuing:
    """Seconds of the thread that hands out tasks: for each, and for each operation of one.

    reads_counts: whether it waits for the counts that ranks exchange, before it hands out what they size.
    halves: whether it hands out all forward tasks before the first of the other half.
    """

    task_s: float
    kernel_s: float
    reads_counts: bool = True
    halves: bool = True

    def reads(self, task: Task) -> bool:
        """Return whether the thread waits for a task's result: NCCL takes split sizes from the host, when it
        issues the first transfer."""
        return self.reads_counts and OPS[task.op].sizes_transfers

    def seconds(self, task: Task) -> float:
        """Return how long the thread is busy with a task."""
        return self.task_s + OPS[task.op].launches * self.kernel_s
