"""`Choice`: every decision that makes a step plan, as one record."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule import SCHEDULES, FSMoE, Partition, Penstock, Pieces, System
from penstock.schedule.penstock import PriorityName


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a plan decides. A schedule reads what it knows (see ScheduleConfig); the rest changes nothing.

    dispatch: how rows travel. partition: which gradients go into which gap, for fsmoe; None = all of a
    layer's into the next gap below it. more: values of dimensions that others registered, by name.
    """

    schedule: str = "sequential"
    microbatches: int = 1
    chunks: int = 1
    backward_chunks: int = 1
    all_reduce_chunk_bytes: int = 1 << 20
    priority: PriorityName = "search"
    dispatch: str = "flat"
    partition: Partition | None = None
    more: tuple[tuple[str, str | int | float], ...] = ()

    @property
    def system(self) -> System:
        """What cuts and orders a step by this choice."""
        if self.schedule == Penstock.name:
            return Penstock(self.priority)
        if self.schedule == FSMoE.name:
            return FSMoE(self.partition)
        return SCHEDULES[self.schedule]

    def pieces(self, all_reduce_bytes: tuple[int, ...], expert_all_reduce_bytes: tuple[int, ...]) -> Pieces:
        """How finely a step is cut, given the bytes of every layer's gradients."""
        return Pieces(
            microbatches=self.microbatches,
            chunks=self.chunks,
            backward_chunks=self.backward_chunks,
            all_reduce_chunk_bytes=self.all_reduce_chunk_bytes,
            all_reduce_bytes=all_reduce_bytes,
            expert_all_reduce_bytes=expert_all_reduce_bytes,
        )
