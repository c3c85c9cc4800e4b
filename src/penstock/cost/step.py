"""The predicted cost of every task of a step, from a workload and a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.cost.cluster import ClusterConfig
from penstock.cost.workload import Workload, part_sizes, split_sizes
from penstock.graph import Lane, Task
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.transfers import TRANSFERS
from penstock.step import StepShape

COUNT_BYTES = 8
STATISTICS_BYTES = 8
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class StepCost:
    """`cost(task)` in seconds, the same on all ranks. Tasks that are alike are worked out once."""

    shape: StepShape
    workload: Workload
    cluster: ClusterConfig
    _known: dict[object, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _reduced: dict[tuple[int, str], tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, task: Task) -> float:
        piece = None if task.microbatch is None else self._samples[task.microbatch]
        alike = (self._kinds[task.layer], task.op, task.phase, piece, task.chunk, task.piece)
        known = self._known.get(alike)
        if known is None:
            computes = task.lane is Lane.COMPUTE
            known = self._known[alike] = self.compute_s(task) if computes else self.communication_s(task)
        return known

    @cached_property
    def _samples(self) -> tuple[int, ...]:
        """Of every microbatch."""
        return split_sizes(self.workload.batch, self.shape.microbatches)

    @cached_property
    def _kinds(self) -> list[int]:
        """For every layer the first one that is like it."""
        shape, work = self.shape, self.workload
        columns: list[Sequence[object]] = [
            shape.moe_layers,
            work.all_reduce_bytes,
            work.expert_all_reduce_bytes,
            shape.all_reduce_chunks,
            shape.expert_all_reduce_chunks,
        ]
        if shape.all_reduce_parts:
            columns.append(shape.all_reduce_parts)
        first: dict[object, int] = {}
        return [first.setdefault(kind, i) for i, kind in enumerate(zip(*columns, strict=True))]

    def communication_s(self, task: Task, load: float = 1.0) -> float:
        """load: how many times as many rows as with even routing."""
        work, cluster = self.workload, self.cluster
        if task.op == Op.COUNTS:
            sent = work.num_experts * task.cut.slices * COUNT_BYTES
            return cluster.all_to_all(work.span(Group.EXPERT)).seconds(sent)
        if task.op in TRANSFERS:
            if task.lane is Lane.INTRA and work.shard_size > 1:
                return self._between_shards_s(task, load)
            leg = cluster.leg(work.dispatch, task.op, work.span(Group.EXPERT))
            return leg.seconds(load * work.wire_bytes(self._rows(task)))
        if task.op == Op.STATISTICS:
            size = sum(self.shape.moe_layers) * 2 * work.num_experts * STATISTICS_BYTES
            return cluster.all_reduce(work.span(Group.WORLD)).seconds(size)
        return self._all_reduce_s(task)

    def _between_shards_s(self, task: Task, load: float) -> float:
        """Rows to all shards of their experts (all-gather), or sums back (reduce-scatter)."""
        work = self.workload
        scatters = (task.op == Op.COMBINE_GATHER) is task.forward
        gathered = load * work.wire_bytes(self._rows(task)) * work.shard_size
        return self.cluster.shards(work.shard_size, scatters=scatters).seconds(gathered)

    def compute_s(self, task: Task) -> float:
        seconds: float = self._computed_s(task, 1.0)
        return seconds

    def loaded_s(self, task: Task, load: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of experts with so many times as many rows as with even routing, each."""
        return np.asarray(self._computed_s(task, load))

    def _computed_s(self, task: Task, load: Any) -> Any:
        flops, moved_bytes = self.forward_work(task)
        pieces = 1
        if task.op == Op.EXPERTS:
            assert task.chunk is not None, task
            pieces = len(task.cut.held)
        alone_s = self.cluster.compute_s(task.op, task.phase, load * flops, load * moved_bytes, pieces)
        return alone_s + self._sharded_s(task)

    def _sharded_s(self, task: Task) -> float:
        """Collectives of tensor parallelism, during which its ranks compute nothing.

        Attention ends with a reduce-scatter over the shards, un-order with an all-gather, and back again.
        """
        work = self.workload
        if work.shard_size == 1 or task.op not in (Op.ATTENTION, Op.UNORDER):
            return 0.0
        assert task.microbatch is not None, task
        whole = work.hidden_bytes(work.tokens(task.microbatch, task.cut.microbatches) * work.shard_size)
        scatters = (task.op == Op.ATTENTION) is task.forward
        return self.cluster.shards(work.shard_size, scatters=scatters).seconds(whole)

    def forward_work(self, task: Task) -> tuple[float, float]:
        """Floating-point operations and bytes copied of the forward task."""
        work = self.workload
        if task.op == Op.EXPERTS:
            rows = self._rows(task)
            return work.expert_flops(rows), 2 * work.hidden_bytes(rows)
        assert task.microbatch is not None, task
        tokens = work.tokens(task.microbatch, task.cut.microbatches)
        copies = work.hidden_bytes(2 * tokens * work.top_k)
        if task.op == Op.ATTENTION:
            dense = 0.0 if self.shape.moe_layers[task.layer] else work.dense_flops(tokens)
            return work.attention_flops(tokens) + dense, copies
        if task.op == Op.SHARED:
            return work.shared_flops(tokens), work.hidden_bytes(2 * tokens)
        if task.op == Op.HEAD:
            return work.head_flops(tokens), work.hidden_bytes(tokens)
        return 0.0, copies

    def _rows(self, task: Task) -> float:
        assert task.microbatch is not None and task.chunk is not None, task
        cut, microbatch = task.cut, task.microbatch
        return sum(self.workload.rows(microbatch, cut.microbatches, s, cut.slices) for s in cut.held)

    def _all_reduce_s(self, task: Task) -> float:
        work = self.workload
        group = Group.WORLD if task.op == Op.ALL_REDUCE else Group.EXPERT_REPLICAS
        return self.cluster.all_reduce(work.span(group)).seconds(self.reduced_bytes(task))

    def reduced_bytes(self, task: Task) -> int:
        """Bytes of gradients in one piece of an all-reduce. A layer is cut once, however many its pieces."""
        assert task.piece is not None, task
        whole = self._kinds[task.layer], task.op
        if whole not in self._reduced:
            replicated = task.op == Op.ALL_REDUCE
            sizes = self.workload.all_reduce_bytes if replicated else self.workload.expert_all_reduce_bytes
            self._reduced[whole] = part_sizes(sizes[task.layer] // FLOAT32_BYTES, task.cut.parts)
        return self._reduced[whole][task.piece] * FLOAT32_BYTES


@dataclass(frozen=True)
class UnevenRanks:
    """A cost on ranks that differ: an array [ranks] for compute tasks.

    slowness: by rank, how many times longer its computation takes. load: by rank, how many times as many
    tokens its experts get as with even routing; a transfer takes as long as the busiest rank's. Empty: alike.
    """

    even: StepCost
    slowness: tuple[float, ...] = ()
    load: tuple[float, ...] = ()

    def __call__(self, task: Task) -> float | npt.NDArray[np.float64]:
        if task.lane is not Lane.COMPUTE:
            busiest = max(1.0, *self.load) if self.load and task.op in TRANSFERS else 1.0
            return self.even(task) if busiest == 1.0 else self.even.communication_s(task, busiest)
        loaded = self.load and task.op == Op.EXPERTS
        seconds = self.even.loaded_s(task, np.array(self.load)) if loaded else self.even(task)
        return seconds * np.array(self.slowness) if self.slowness else seconds
