"""What it takes of a rank's one thread to hand tasks to a GPU.

On CPUs every lane has a thread of its own. On a GPU one thread hands out the tasks of all lanes, one after
another, and no task starts before that: where tasks are small, a step takes as long as this thread works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.graph import Task
from penstock.ops import Op

KERNELS: Final = {
    Op.ATTENTION: 58,
    Op.GATE: 39,
    Op.HEADS: 18,
    Op.EXPERTS: 16,
    Op.STATISTICS: 80,
    Op.HEAD: 8,
    Op.LOGITS: 16,
    Op.LOSS: 12,
    Op.EMBED: 8,
    Op.UNORDER: 6,
    Op.COUNTS: 4,
}
"""Operations that a task of an op gives to a device, counted on a stand-in for a GPU (Penstock's own decoder,
experts in grouped products); forward and backward differ by less than a half."""

FEWEST: Final = 3
"""Operations of any other task: a collective, and what puts its rows in order."""


def kernels_of(op: str) -> int:
    """Return how many operations a task of this op gives to a device."""
    return KERNELS.get(op, FEWEST)


@dataclass(frozen=True)
class Issuing:
    """Seconds of the thread that hands out tasks: for each, and for each operation of one.

    reads_counts: whether it waits for the counts that ranks exchange, before it hands out what they size.
    """

    task_s: float
    kernel_s: float
    reads_counts: bool = True

    @property
    def read(self) -> tuple[str, ...]:
        """Ops whose results are split sizes of transfers: NCCL takes them from the host, which waits for them
        when it issues the first transfer."""
        return (Op.COUNTS,) if self.reads_counts else ()

    def seconds(self, task: Task) -> float:
        """Return how long the thread is busy with a task."""
        return self.task_s + kernels_of(task.op) * self.kernel_s
