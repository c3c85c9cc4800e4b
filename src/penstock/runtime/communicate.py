"""Handlers of the communication lanes. An all-to-all's transpose is an all-to-all with splits swapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.graph import Group, Phase, StepShape, Task
from penstock.graph.dependencies import B, F, experts_input
from penstock.graph.task import Op
from penstock.moe import Routes
from penstock.runtime.buckets import GradientBucket
from penstock.runtime.compute import Attended, ExpertGradient, UnorderGradients, find_routes
from penstock.runtime.executor import Inputs
from penstock.runtime.results import Outcome
from penstock.runtime.statistics import HeadSums, RouterSums, StatisticsCodec, StepStatistics
from penstock.runtime.transport import Transport


class HostRoutes:
    """Exchanged counts on their way to the host. Reading them waits for the copy, not for the device.

    The only point where a dropless step on a GPU makes the host wait: NCCL needs split sizes as numbers.
    """

    def __init__(self, sent: Tensor, received: Tensor) -> None:
        both = torch.stack([sent, received])
        self._event: torch.cuda.Event | None = None
        if both.is_cuda:
            host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            host.copy_(both, non_blocking=True)
            self._event = torch.cuda.current_stream().record_event()
            both = host
        self._both = both
        self._routes: Routes | None = None

    @property
    def chunks(self) -> Sequence[Any]:
        if self._routes is None:
            if self._event is not None:
                self._event.synchronize()
            self._routes = Routes.from_counts(*self._both.tolist())
        return self._routes.chunks


@dataclass(frozen=True)
class Buckets:
    """Gradient buckets by layer. experts: empty buckets where no expert has a replica."""

    replicated: Sequence[GradientBucket]
    experts: Sequence[GradientBucket]

    @property
    def sizes_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of every layer's replicated and expert gradients."""
        replicated = tuple(bucket.size_bytes for bucket in self.replicated)
        return replicated, tuple(bucket.size_bytes for bucket in self.experts)


class CommunicationHandlers:
    """Built for one step: what each transfer moves, and to whom."""

    def __init__(
        self, transport: Transport, shape: StepShape, buckets: Buckets, codec: StatisticsCodec
    ) -> None:
        self.transport, self.shape, self.buckets, self.codec = transport, shape, buckets, codec
        self.total: StepStatistics | None = None

    def table(self) -> dict[tuple[Op, Phase], Callable[[Task, Inputs], Outcome]]:
        """The handler of every communication op and phase."""
        return {
            (Op.COUNTS, F): self.counts,
            (Op.DISPATCH, F): self.dispatch,
            (Op.COMBINE, F): self.combine,
            (Op.STATISTICS, F): self.statistics,
            (Op.COMBINE, B): self.combine_backward,
            (Op.DISPATCH, B): self.dispatch_backward,
            (Op.ALL_REDUCE, B): self.all_reduce,
            (Op.EXPERT_ALL_REDUCE, B): self.expert_all_reduce,
        }

    def counts(self, task: Task, inputs: Inputs) -> Outcome:
        attended: Attended = inputs[Task(task.layer, Op.ATTENTION, F, task.microbatch)]
        counts_CE = attended.ordered.counts_CE
        assert counts_CE is not None, task
        ranks = self.transport.size(Group.EXPERT)
        # [chunk, rank, local expert] -> [rank, chunk, local expert]: one equal piece per rank.
        sent = counts_CE.view(self.shape.chunks, ranks, -1).transpose(0, 1).contiguous()
        received = self.transport.all_to_all(sent, [1] * ranks, [1] * ranks)
        routes = HostRoutes(sent, received)
        return Outcome(routes, routes)

    def dispatch(self, task: Task, inputs: Inputs) -> Outcome:
        attended: Attended = inputs[Task(task.layer, Op.ATTENTION, F, task.microbatch)]
        rows = attended.rows_RM.split(list(attended.ordered.chunk_rows))[_chunk(task)]
        return self._to_experts(task, inputs, rows)

    def combine(self, task: Task, inputs: Inputs) -> Outcome:
        return self._to_home(
            task, inputs, inputs[Task(task.layer, Op.EXPERTS, F, task.microbatch, task.chunk)]
        )

    def combine_backward(self, task: Task, inputs: Inputs) -> Outcome:
        grads: UnorderGradients = inputs[Task(task.layer, Op.UNORDER, B, task.microbatch)]
        routes = find_routes(task, inputs, self.shape)
        sizes = [sum(route.input_splits) for route in routes.chunks]
        return self._to_experts(task, inputs, grads.rows_RM.split(sizes)[_chunk(task)])

    def dispatch_backward(self, task: Task, inputs: Inputs) -> Outcome:
        made: ExpertGradient = inputs[experts_input(task, self.shape)]
        return self._to_home(task, inputs, made.rows_RM)

    def _to_experts(self, task: Task, inputs: Inputs, rows: Tensor) -> Outcome:
        route = find_routes(task, inputs, self.shape).chunks[_chunk(task)]
        return Outcome(self.transport.all_to_all(rows, route.input_splits, route.output_splits))

    def _to_home(self, task: Task, inputs: Inputs, rows: Tensor) -> Outcome:
        route = find_routes(task, inputs, self.shape).chunks[_chunk(task)]
        return Outcome(self.transport.all_to_all(rows, route.output_splits, route.input_splits))

    def statistics(self, task: Task, inputs: Inputs) -> Outcome:
        pieces = range(self.shape.microbatches)
        heads: list[HeadSums] = [inputs[Task(task.layer, Op.HEAD, F, m)] for m in pieces]
        routers: list[list[RouterSums]] = [
            [inputs[Task(layer, Op.ATTENTION, F, m)].sums for m in pieces]
            for layer, is_moe in enumerate(self.shape.moe_layers)
            if is_moe
        ]
        packed = self.codec.pack(heads, routers)
        self.transport.all_reduce(packed, Group.WORLD)
        self.total = self.codec.unpack(packed)
        return Outcome(self.total, self.total)

    def all_reduce(self, task: Task, inputs: Inputs) -> Outcome:
        del inputs  # the gradients are in the bucket; the dependency says that they are complete
        chunks = self.shape.all_reduce_chunks[task.layer]
        self.transport.all_reduce(
            self.buckets.replicated[task.layer].chunk(_chunk(task), chunks), Group.WORLD
        )
        return Outcome(None)

    def expert_all_reduce(self, task: Task, inputs: Inputs) -> Outcome:
        del inputs
        chunks = self.shape.expert_all_reduce_chunks[task.layer]
        bucket = self.buckets.experts[task.layer]
        self.transport.all_reduce(bucket.chunk(_chunk(task), chunks), Group.EXPERT_REPLICAS)
        return Outcome(None)


def _chunk(task: Task) -> int:
    assert task.chunk is not None, task
    return task.chunk
