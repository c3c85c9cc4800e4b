"""What a step costs on every rank when tokens are not spread evenly. No torch: the simulator reads it too.

Shapes: P ranks, E experts, and those of `penstock.virtual.rows`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.cost import ClusterConfig, StepCost, Workload
from penstock.graph import Lane, Op, StepShape, Task
from penstock.virtual.apportion import Counts
from penstock.virtual.rows import by_source_and_target, cut_rows

Seconds = npt.NDArray[np.float64]
Splits = tuple[list[int], list[int]]
"""Rows to and rows from every rank of the expert group."""


@dataclass(frozen=True)
class VirtualCost:
    """`cost(task)` in seconds, an array [ranks]: `StepCost`, but experts and transfers follow the routing.

    counts_PBYE: token copies of every sample for every expert, as `Routing.counts` gives them.
    """

    shape: StepShape
    workload: Workload
    cluster: ClusterConfig
    counts_PBYE: Counts

    def __call__(self, task: Task) -> Seconds:
        """Seconds on every rank, [P]; of a transfer without the time to wait for partners."""
        return self.seconds(task) if task.lane is Lane.COMPUTE else self.transfer_s(task)

    def seconds(self, task: Task) -> Seconds:
        """Seconds of a compute task on every rank, [P]."""
        even_s = self._even.compute_s(task)
        if task.op is not Op.EXPERTS:
            return self._everywhere(even_s)
        # What experts compute and copy is in proportion to their rows; the overhead is not.
        overhead_s = self.cluster.task_overhead_s
        share = self._received(task).astype(np.float64) / max(self._even_rows(task), 1)
        return overhead_s + (even_s - overhead_s) * share

    def transfer_s(self, task: Task) -> Seconds:
        """Seconds of a communication task on every rank, [P], by its busier direction."""
        if task.op not in (Op.DISPATCH, Op.COMBINE):
            return self._everywhere(self._even.communication_s(task))
        ranks = self.workload.ep_size
        link = self.cluster.all_to_all(ranks)
        # The model's argument is a buffer of which one part in `ranks` stays at home.
        buffer = self._remote(task) * ranks / max(ranks - 1, 1)
        return np.array([link.seconds(self.workload.hidden_bytes(rows)) for rows in buffer.tolist()])

    def alone_s(self, tasks: Iterable[Task]) -> Seconds:
        """What the computation of a step takes on every rank if nothing is ever waited for, [P]."""
        compute = [self.seconds(task) for task in tasks if task.lane is Lane.COMPUTE]
        total: Seconds = np.stack(compute).sum(axis=0)
        return total

    def splits(self, task: Task, rank: int) -> Splits:
        """What an all-to-all hands to the transport on one rank: input splits and output splits, in rows.

        A row is a hidden state in dispatch and combine, all counts for one peer in the exchange of counts.
        """
        if task.op is Op.COUNTS:
            return [1] * self.workload.ep_size, [1] * self.workload.ep_size
        table = self._table(self._piece(task))
        group, place = divmod(rank, self.workload.ep_size)
        sent, received = table[group, place].sum(axis=-1), table[group, :, place].sum(axis=-1)
        home, away = sent.tolist(), received.tolist()
        return (home, away) if self._to_experts(task) else (away, home)

    def exchanged_counts(self, task: Task, rank: int) -> tuple[Counts, Counts]:
        """What a COUNTS task sends and receives on one rank, both [peers, chunks, local experts]."""
        assert task.op is Op.COUNTS and task.microbatch is not None, task
        group, place = divmod(rank, self.workload.ep_size)
        layer, rows = self._moe_layer(task), self.rows[:, task.microbatch]
        tables = np.stack([self._table(rows[:, c, layer]) for c in range(self.shape.chunks)], axis=3)
        return tables[group, place], tables[group, :, place]

    @cached_property
    def rows(self) -> Counts:
        """Rows that every rank sends to every expert, [ranks, microbatches, chunks, MoE layers, experts]."""
        return cut_rows(self.counts_PBYE, self.shape, self.workload)

    @property
    def _even(self) -> StepCost:
        return StepCost(self.shape, self.workload, self.cluster)

    def _even_rows(self, task: Task) -> float:
        """Rows that every rank's experts would get if routing were even."""
        assert task.microbatch is not None and task.chunk is not None, task
        pieces, chunks = self.shape.microbatches, self.shape.chunks
        return self.workload.rows(task.microbatch, pieces, task.chunk, chunks)

    def _received(self, task: Task) -> Counts:
        """Rows that every rank's experts get, [P]."""
        received: Counts = self._table(self._piece(task)).sum(axis=(1, 3)).reshape(-1)
        return received

    def _remote(self, task: Task) -> Counts:
        """Rows over every rank's link in its busier direction, [P]."""
        by_pair = self._table(self._piece(task)).sum(axis=3)
        busier = np.maximum(by_pair.sum(axis=2), by_pair.sum(axis=1))
        remote: Counts = busier - by_pair.diagonal(axis1=1, axis2=2)
        return remote.reshape(-1)

    def _piece(self, task: Task) -> Counts:
        """Rows of the task's microbatch and chunk, [P, E]."""
        assert task.microbatch is not None and task.chunk is not None, task
        return self.rows[:, task.microbatch, task.chunk, self._moe_layer(task)]

    def _table(self, rows_PE: Counts) -> Counts:
        return by_source_and_target(rows_PE, self.workload.ep_size)

    def _moe_layer(self, task: Task) -> int:
        """The task's layer counted among MoE layers."""
        return sum(self.shape.moe_layers[: task.layer])

    @staticmethod
    def _to_experts(task: Task) -> bool:
        """Rows go to the experts in dispatch; in backward, gradients go there in combine."""
        return (task.op is Op.DISPATCH) is task.forward

    def _everywhere(self, seconds: float) -> Seconds:
        return np.full(self.workload.world_size, seconds)
