"""The predicted cost of every task of a step, from a workload and a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost.cluster import ClusterConfig
from penstock.cost.workload import Workload, split_sizes
from penstock.graph import Op, Phase, StepShape, Task
from penstock.graph.dependencies import TRANSFERS

COUNT_BYTES = 8
STATISTICS_BYTES = 8
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class StepCost:
    """`cost(task)` in seconds. Backward matrix products cost twice the forward ones."""

    shape: StepShape
    workload: Workload
    cluster: ClusterConfig

    def __call__(self, task: Task) -> float:
        return self.communication_s(task) if task.lane != "compute" else self.compute_s(task)

    def communication_s(self, task: Task) -> float:
        work, cluster = self.workload, self.cluster
        if task.op is Op.COUNTS:
            sent = work.num_experts * self.shape.chunks * COUNT_BYTES
            return cluster.all_to_all(work.ep_size).seconds(sent)
        if task.op in TRANSFERS:
            leg = cluster.leg(work.dispatch, task.op, work.nodes, work.ranks_per_node)
            return leg.seconds(work.wire_bytes(self._rows(task)))
        if task.op is Op.STATISTICS:
            size = sum(self.shape.moe_layers) * 2 * work.num_experts * STATISTICS_BYTES
            return cluster.all_reduce(work.world_size).seconds(size)
        return self._all_reduce_s(task)

    def compute_s(self, task: Task) -> float:
        flops, moved = self._forward_work(task)
        scale = 2 if task.phase is Phase.BACKWARD else 1  # a split backward is two halves of that
        seconds = flops / self.cluster.flops_per_s + moved / self.cluster.memory_bytes_per_s
        return self.cluster.task_overhead_s + scale * seconds

    def _forward_work(self, task: Task) -> tuple[float, float]:
        """Floating-point operations and bytes copied of the forward task."""
        work = self.workload
        if task.op is Op.EXPERTS:
            rows = self._rows(task)
            return work.expert_flops(rows), 2 * work.hidden_bytes(rows)
        assert task.microbatch is not None, task
        tokens = work.tokens(task.microbatch, self.shape.microbatches)
        copies = work.hidden_bytes(2 * tokens * work.top_k)
        if task.op is Op.ATTENTION:
            dense = 0.0 if self.shape.moe_layers[task.layer] else work.dense_flops(tokens)
            return work.attention_flops(tokens) + dense, copies
        if task.op is Op.SHARED:
            return work.shared_flops(tokens), work.hidden_bytes(2 * tokens)
        if task.op is Op.HEAD:
            return work.head_flops(tokens), work.hidden_bytes(tokens)
        return 0.0, copies

    def _rows(self, task: Task) -> float:
        assert task.microbatch is not None and task.chunk is not None, task
        shape = self.shape
        return self.workload.rows(task.microbatch, shape.microbatches, task.chunk, shape.chunks)

    def _all_reduce_s(self, task: Task) -> float:
        work, shape = self.workload, self.shape
        replicated = task.op is Op.ALL_REDUCE
        sizes = work.all_reduce_bytes if replicated else work.expert_all_reduce_bytes
        chunks = shape.all_reduce_chunks if replicated else shape.expert_all_reduce_chunks
        ranks = work.world_size if replicated else work.world_size // work.ep_size
        assert task.chunk is not None, task
        elements = split_sizes(sizes[task.layer] // FLOAT32_BYTES, chunks[task.layer])[task.chunk]
        return self.cluster.all_reduce(ranks).seconds(elements * FLOAT32_BYTES)
