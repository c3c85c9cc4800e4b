"""Handlers of the communication lanes. The transpose of a leg is the same leg the other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.graph import Group, Phase, StepShape, Task
from penstock.graph.dependencies import TRANSFERS, B, F, experts_input
from penstock.graph.task import AWAY, Op
from penstock.moe import RouteMaker
from penstock.moe.choices import GateSums
from penstock.runtime.buckets import GradientBucket
from penstock.runtime.compute import Attended, ExpertGradient, UnorderGradients, find_routes
from penstock.runtime.executor import Inputs
from penstock.runtime.legs import exchange_counts, send_home, send_out
from penstock.runtime.results import Outcome
from penstock.runtime.statistics import HeadSums, StatisticsCodec, StepStatistics
from penstock.runtime.transport import Transports


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
        self,
        transports: Transports,
        makers: Sequence[RouteMaker | None],
        shape: StepShape,
        buckets: Buckets,
        codec: StatisticsCodec,
    ) -> None:
        """makers: what makes the routes of each layer."""
        self.transports, self.makers = transports, makers
        self.shape, self.buckets, self.codec = shape, buckets, codec
        self.total: StepStatistics | None = None

    def table(self) -> dict[tuple[Op, Phase], Callable[[Task, Inputs], Outcome]]:
        """The handler of every communication op and phase."""
        return {
            (Op.COUNTS, F): self.counts,
            **{(op, F): self.move for op in TRANSFERS},
            **{(op, B): self.move_back for op in TRANSFERS},
            (Op.STATISTICS, F): self.statistics,
            (Op.ALL_REDUCE, B): self.all_reduce,
            (Op.EXPERT_ALL_REDUCE, B): self.expert_all_reduce,
        }

    def counts(self, task: Task, inputs: Inputs) -> Outcome:
        attended: Attended = inputs[Task(task.layer, Op.ATTENTION, F, task.microbatch)]
        counts_CN, maker = attended.plan.counts_CN, self.makers[task.layer]
        assert counts_CN is not None and maker is not None, task
        routes = exchange_counts(counts_CN, maker, self.transports.inter)
        return Outcome(routes, routes)

    def move(self, task: Task, inputs: Inputs) -> Outcome:
        """A leg of dispatch or combine, forward."""
        place = self.shape.moe_chain.index(task.op)
        if place == 0:
            attended: Attended = inputs[Task(task.layer, Op.ATTENTION, F, task.microbatch)]
            rows = attended.rows_RM.split(list(attended.plan.chunk_rows))[_chunk(task)]
        else:
            rows = inputs[_at(task, self.shape.moe_chain[place - 1], F)]
        return Outcome(self._leg(task, inputs, rows, outward=task.op in self.shape.dispatch))

    def move_back(self, task: Task, inputs: Inputs) -> Outcome:
        """The transpose of the same leg: gradients go the other way."""
        chain = self.shape.moe_chain
        place = chain.index(task.op)
        if place + 1 == len(chain):
            grads: UnorderGradients = inputs[Task(task.layer, Op.UNORDER, B, task.microbatch)]
            sizes = [sum(route.rows_sent) for route in find_routes(task, inputs, self.shape).chunks]
            rows = grads.rows_RM.split(sizes)[_chunk(task)]
        elif chain[place + 1] is Op.EXPERTS:
            made: ExpertGradient = inputs[experts_input(task, self.shape)]
            rows = made.rows_RM
        else:
            rows = inputs[_at(task, chain[place + 1], B)]
        return Outcome(self._leg(task, inputs, rows, outward=task.op not in self.shape.dispatch))

    def _leg(self, task: Task, inputs: Inputs, rows: Tensor, *, outward: bool) -> Tensor:
        """Along the leg towards the experts, or along the same leg home."""
        route = find_routes(task, inputs, self.shape).chunks[_chunk(task)]
        op = task.op if task.op in self.shape.dispatch else AWAY[task.op]
        if not route.legs:  # every expert is on this rank
            return rows
        leg = route.legs[self.shape.dispatch.index(op)]
        transport = self.transports.of(task.lane)
        return send_out(rows, leg, transport) if outward else send_home(rows, leg, transport)

    def statistics(self, task: Task, inputs: Inputs) -> Outcome:
        pieces = range(self.shape.microbatches)
        heads: list[HeadSums] = [inputs[Task(task.layer, Op.HEAD, F, m)] for m in pieces]
        routers: list[list[GateSums]] = [
            [inputs[Task(layer, Op.ATTENTION, F, m)].sums for m in pieces]
            for layer, is_moe in enumerate(self.shape.moe_layers)
            if is_moe
        ]
        packed = self.codec.pack(heads, routers)
        self.transports.inter.all_reduce(packed, Group.WORLD)
        self.total = self.codec.unpack(packed)
        return Outcome(self.total, self.total)

    def all_reduce(self, task: Task, inputs: Inputs) -> Outcome:
        del inputs  # the gradients are in the bucket; the dependency says that they are complete
        chunks = self.shape.all_reduce_chunks[task.layer]
        self.transports.inter.all_reduce(
            self.buckets.replicated[task.layer].chunk(_chunk(task), chunks), Group.WORLD
        )
        return Outcome(None)

    def expert_all_reduce(self, task: Task, inputs: Inputs) -> Outcome:
        del inputs
        chunks = self.shape.expert_all_reduce_chunks[task.layer]
        bucket = self.buckets.experts[task.layer]
        self.transports.inter.all_reduce(bucket.chunk(_chunk(task), chunks), Group.EXPERT_REPLICAS)
        return Outcome(None)


def _at(task: Task, op: Op, phase: Phase) -> Task:
    return Task(task.layer, op, phase, task.microbatch, task.chunk)


def _chunk(task: Task) -> int:
    assert task.chunk is not None, task
    return task.chunk
