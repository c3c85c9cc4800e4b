"""Handlers of the communication lanes. The transpose of a leg is the same leg the other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.graph import Group, Phase, StepShape, Task
from penstock.graph.dependencies import TRANSFERS, B, F, experts_input
from penstock.graph.task import AWAY, Op
from penstock.moe import RouteMaker
from penstock.moe.choices import GateSums
from penstock.runtime.buckets import Buckets
from penstock.runtime.compute import Attended, ExpertGradient, UnorderGradients, find_routes
from penstock.runtime.executor import Inputs
from penstock.runtime.legs import exchange_counts, send_home, send_out
from penstock.runtime.results import Outcome
from penstock.runtime.slices import to_ranks, to_slices
from penstock.runtime.statistics import HeadSums, StatisticsCodec, StepStatistics
from penstock.runtime.transport import Transports

Rows = Tensor | tuple[Tensor, ...]
"""Under way one tensor, rank by rank; before and behind that one tensor per slice."""


class CommunicationHandlers:
    """Built for one step: what each transfer moves, and to whom."""

    def __init__(
        self,
        transports: Transports,
        makers: Sequence[RouteMaker | None],
        shape: StepShape,
        buckets: Buckets,
        codec: StatisticsCodec,
        marks: Tensor,
    ) -> None:
        """makers: what makes the routes of each layer. marks: [5] float64, to sum with the statistics."""
        self.transports, self.makers = transports, makers
        self.shape, self.buckets, self.codec = shape, buckets, codec
        self._marks = marks
        self.marks_total: Tensor | None = None
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
        routes = exchange_counts(counts_CN, maker, self.transports.inter, self.shape.degrees)
        return Outcome(routes, routes)

    def move(self, task: Task, inputs: Inputs) -> Outcome:
        """A leg of dispatch or combine, forward."""
        place = self.shape.moe_chain.index(task.op)
        if place == 0:
            attended: Attended = inputs[Task(task.layer, Op.ATTENTION, F, task.microbatch)]
            rows = self._slices(attended.rows_RM, attended.plan.chunk_rows, task)
        else:
            rows = inputs[_at(task, self.shape.moe_chain[place - 1], F)]
        return Outcome(self._leg(task, inputs, rows, outward=task.op in self.shape.dispatch))

    def move_back(self, task: Task, inputs: Inputs) -> Outcome:
        """The transpose of the same leg: gradients go the other way."""
        chain = self.shape.moe_chain
        place = chain.index(task.op)
        if place + 1 == len(chain):
            grads: UnorderGradients = inputs[Task(task.layer, Op.UNORDER, B, task.microbatch)]
            sizes = [sum(route.rows_sent) for route in find_routes(task, inputs, self.shape).slices]
            rows = self._slices(grads.rows_RM, sizes, task)
        elif chain[place + 1] is Op.EXPERTS:
            made: ExpertGradient = inputs[experts_input(task, self.shape)]
            rows = made.rows
        else:
            rows = inputs[_at(task, chain[place + 1], B)]
        return Outcome(self._leg(task, inputs, rows, outward=task.op not in self.shape.dispatch))

    def _slices(self, rows_RM: Tensor, sizes: Sequence[int], task: Task) -> tuple[Tensor, ...]:
        """The slices of the task's chunk, of all slices one after the other."""
        slices: tuple[Tensor, ...] = rows_RM.split(list(sizes))
        return slices[self._run(task)]

    def _run(self, task: Task) -> slice:
        held = self.shape.slices_of(_chunk(task), task.phase)
        return slice(held.start, held.stop)

    def _leg(self, task: Task, inputs: Inputs, rows: Rows, *, outward: bool) -> Rows:
        """Along the leg towards the experts, or along the same leg home.

        rows: before the first leg a tuple with one tensor per slice, as behind the last one.
        """
        routes = find_routes(task, inputs, self.shape)
        legs = routes.of(task.phase)[_chunk(task)].legs
        if not legs:  # every expert is on this rank
            return rows
        slices = routes.slices[self._run(task)]
        op = task.op if task.op in self.shape.dispatch else AWAY[task.op]
        number, transport = self.shape.dispatch.index(op), self.transports.of(task.lane)
        sent, received = [s.rows_sent for s in slices], [s.rows_received for s in slices]
        first, last = (0, len(legs) - 1) if outward else (len(legs) - 1, 0)
        if number == first:
            assert isinstance(rows, tuple), task
            rows = to_ranks(rows, sent if outward else received)
        assert isinstance(rows, Tensor), task
        rows = (send_out if outward else send_home)(rows, legs[number], transport)
        return to_slices(rows, received if outward else sent) if number == last else rows

    def statistics(self, task: Task, inputs: Inputs) -> Outcome:
        pieces = range(self.shape.microbatches)
        heads: list[HeadSums] = [inputs[Task(task.layer, Op.HEAD, F, m)] for m in pieces]
        routers: list[list[GateSums]] = [
            [inputs[Task(layer, Op.ATTENTION, F, m)].sums for m in pieces]
            for layer, is_moe in enumerate(self.shape.moe_layers)
            if is_moe
        ]
        sums = self.codec.pack(heads, routers)
        packed = torch.cat([sums, self._marks])
        self.transports.inter.all_reduce(packed, Group.WORLD)
        self.total, self.marks_total = self.codec.unpack(packed[: len(sums)]), packed[len(sums) :]
        return Outcome(self.total, self.total)

    def all_reduce(self, task: Task, inputs: Inputs) -> Outcome:
        del inputs  # the gradients are in the bucket; the dependency says that they are complete
        parts = self.shape.parts_of(task.layer)
        for piece in self.buckets.replicated[task.layer].chunk(_chunk(task), parts):
            self.transports.inter.all_reduce(piece, Group.WORLD)
        return Outcome(None)

    def expert_all_reduce(self, task: Task, inputs: Inputs) -> Outcome:
        del inputs
        parts = self.shape.parts_of(task.layer, Op.EXPERT_ALL_REDUCE)
        for piece in self.buckets.experts[task.layer].chunk(_chunk(task), parts):
            self.transports.inter.all_reduce(piece, Group.EXPERT_REPLICAS)
        return Outcome(None)


def _at(task: Task, op: Op, phase: Phase) -> Task:
    return Task(task.layer, op, phase, task.microbatch, task.chunk)


def _chunk(task: Task) -> int:
    assert task.chunk is not None, task
    return task.chunk
