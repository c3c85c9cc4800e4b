"""Handlers of the compute lane: each runs one segment of the model, forward or backward.

Rows that leave for another rank or come from one are a tuple with one tensor per slice of their chunk.
Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens, R rows in expert order, k choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.graph import Task
from penstock.graph.dependencies import (
    INPUT,
    WEIGHT,
    B,
    F,
    block_gradient,
    block_output,
    routing,
    statistics_task,
)
from penstock.moe import ChunkRoute, MoELayer, RouteMaker, Routes, SampleKeys, Tokens
from penstock.moe.balance import Balance
from penstock.moe.choices import GateSums
from penstock.moe.config import MoEConfig
from penstock.moe.experts.weight_gradients import AutogradWeights, WeightGradients
from penstock.moe.orders.base import OrderPlan
from penstock.ops import Op
from penstock.runtime.executor import Inputs
from penstock.runtime.legs import HostRoutes
from penstock.runtime.parts import ModelParts
from penstock.runtime.results import Outcome
from penstock.runtime.segment import AnySegment
from penstock.runtime.slices import joined
from penstock.runtime.statistics import HeadSums, StepStatistics
from penstock.step import StepShape


@dataclass(frozen=True)
class Batch:
    """One rank's batch, cut into microbatches: lists over microbatches of [b, L] and [b].

    valid: bool [b, L], False for padding; None if there is none.
    """

    tokens: Sequence[Tensor]
    labels: Sequence[Tensor]
    keys: Sequence[SampleKeys]
    valid: Sequence[Tensor] | None = None

    def info(self, microbatch: int) -> Tokens:
        """What an MoE layer is told about a microbatch."""
        keys = self.keys[microbatch]
        valid_T = None if self.valid is None else self.valid[microbatch].flatten()
        return Tokens(samples=len(keys.sample_ids_B), keys=keys, valid_T=valid_T)


@dataclass(frozen=True)
class Attended:
    """Value of AT.F in an MoE block. rows_RM: all slices one after the other. x_TM: for shared experts.

    weights: for un-order, its shape is the order's affair. routes: only where sizes are fixed.
    """

    residual_BLM: Tensor
    rows_RM: Tensor
    weights: Tensor
    x_TM: Tensor
    plan: OrderPlan
    sums: GateSums
    routes: Routes | None


@dataclass(frozen=True)
class SavedAttention:
    """What AT.B needs of AT.F. routes: only where sizes are fixed."""

    segment: AnySegment
    chosen_BE: Tensor
    routes: Routes | None


@dataclass(frozen=True)
class SavedSlice:
    """What the backward of X needs of one slice of X.F."""

    segment: AnySegment
    weights: WeightGradients | AutogradWeights


@dataclass(frozen=True)
class ExpertGradient:
    """Value of X.B or X.I: the gradient of every slice's received rows, and weight gradients still to be
    made."""

    rows: tuple[Tensor, ...]
    weights: tuple[WeightGradients | AutogradWeights, ...]


@dataclass(frozen=True)
class SavedHead:
    """What HD.B needs of HD.F."""

    segment: AnySegment
    loss_dtype: torch.dtype


@dataclass(frozen=True)
class UnorderGradients:
    """Value of U.B: gradients of all that entered U. weights: None where they travelled with the rows."""

    residual_BLM: Tensor
    weights: Tensor | None
    rows_RM: Tensor
    shared_TM: Tensor | None


class ComputeHandlers:
    """Built for one step: the model, its microbatches, and the gradient of the loss once it is known.

    makers: what makes the routes of each layer; None for a dense one.
    """

    def __init__(
        self,
        model: ModelParts,
        shape: StepShape,
        batch: Batch,
        moe: MoEConfig,
        makers: Sequence[RouteMaker | None],
        balance: Balance,
        segment: Callable[[], AnySegment],
        autocast: Callable[[], AbstractContextManager[Any]],
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.model, self.shape, self.batch, self.moe = model, shape, batch, moe
        self.makers, self.balance = makers, balance
        self.segment, self.autocast, self.wire_dtype = segment, autocast, wire_dtype
        self.loss_gradient = torch.ones(())

    def table(self) -> dict[tuple[str, Any], Callable[[Task, Inputs], Outcome]]:
        """The handler of every compute op and phase."""
        return {
            (Op.EMBED, F): self.embed,
            (Op.ATTENTION, F): self.attention,
            (Op.SHARED, F): self.shared,
            (Op.EXPERTS, F): self.experts,
            (Op.UNORDER, F): self.unorder,
            (Op.HEAD, F): self.head,
            (Op.HEAD, B): self.head_backward,
            (Op.UNORDER, B): self.unorder_backward,
            (Op.SHARED, B): self.shared_backward,
            (Op.EXPERTS, B): self.experts_backward,
            (Op.EXPERTS, INPUT): self.experts_backward,
            (Op.EXPERTS, WEIGHT): self.experts_weights,
            (Op.ATTENTION, B): self.attention_backward,
            (Op.EMBED, B): self.embed_backward,
        }

    def embed(self, task: Task, inputs: Inputs) -> Outcome:
        del inputs
        m = _microbatch(task)
        segment = self.segment()
        segment.enter()
        with self.autocast():
            (h_BLM,) = segment.leave(self.model.embed(self.batch.tokens[m], self.batch.keys[m]))
        return Outcome(h_BLM, segment)

    def attention(self, task: Task, inputs: Inputs) -> Outcome:
        m = _microbatch(task)
        block = self.model.parts[task.layer]
        segment = self.segment()
        (h_BLM,) = segment.enter(inputs[block_output(task.layer - 1, m, self.shape)])
        with self.autocast():
            residual_BLM, x_TM = block.attend(h_BLM, self.batch.keys[m])
            if block.moe is not None:
                return self._route(task, block.moe, segment, residual_BLM, x_TM)
            out_BLM = block.add(residual_BLM, block.dense(x_TM), self.batch.keys[m])
            (out_BLM,) = segment.leave(out_BLM)
        return Outcome(out_BLM, segment)

    def _route(
        self, task: Task, moe: MoELayer, segment: AnySegment, residual_BLM: Tensor, x_TM: Tensor
    ) -> Outcome:
        if self.wire_dtype is not None:
            x_TM = x_TM.to(self.wire_dtype)
        routed = moe.route(x_TM, self.batch.info(_microbatch(task)), self.shape.slices)
        sums = routed.sums
        residual_BLM, rows_RM, weights, probability_BE, z, x_TM = segment.leave(
            residual_BLM, routed.rows_RM, routed.weights, sums.probability_BE, sums.z, routed.x_TM
        )
        maker = self.makers[task.layer]
        assert maker is not None, task
        slots = routed.plan.slots
        routes = None if slots is None else maker.even(slots, moe.num_local_experts, self.shape.degrees)
        left = GateSums(sums.chosen_BE, probability_BE, z)
        value = Attended(residual_BLM, rows_RM, weights, x_TM, routed.plan, left, routes)
        return Outcome(value, SavedAttention(segment, sums.chosen_BE, routes))

    def shared(self, task: Task, inputs: Inputs) -> Outcome:
        moe = self.model.parts[task.layer].moe
        assert moe is not None and moe.shared is not None, task
        attended: Attended = inputs[Task(task.layer, Op.ATTENTION, F, task.microbatch)]
        segment = self.segment()
        (x_TM,) = segment.enter(attended.x_TM)
        with self.autocast():
            (out_TM,) = segment.leave(moe.shared(x_TM))
        return Outcome(out_TM, segment)

    def shared_backward(self, task: Task, inputs: Inputs) -> Outcome:
        segment: AnySegment = inputs[Task(task.layer, Op.SHARED, F, task.microbatch)]
        unordered: UnorderGradients = inputs[Task(task.layer, Op.UNORDER, B, task.microbatch)]
        return Outcome(_present(segment.backward([unordered.shared_TM]))[0])

    def experts(self, task: Task, inputs: Inputs) -> Outcome:
        """Every slice is a segment of its own, so that a backward chunk may be another run of slices."""
        moe = self.model.parts[task.layer].moe
        assert moe is not None and task.chunk is not None, task
        slices = self.shape.slices_of(task.chunk, F)
        routes = find_routes(task, inputs, self.shape).slices[slices.start : slices.stop]
        arrived = inputs[Task(task.layer, self.shape.dispatch[-1], F, task.microbatch, task.chunk)]
        made = [self._experts_slice(moe, rows, route) for rows, route in zip(arrived, routes, strict=True)]
        saved = dict(zip(slices, (left for _, left in made), strict=True))
        return Outcome(tuple(out for out, _ in made), saved)

    def _experts_slice(self, moe: MoELayer, rows_RM: Tensor, route: ChunkRoute) -> tuple[Tensor, SavedSlice]:
        segment = self.segment()
        weights = WeightGradients() if self.shape.split_experts else AutogradWeights()
        (rows_RM,) = segment.enter(rows_RM)
        with self.autocast():
            (out_RM,) = segment.leave(moe.expert_rows(rows_RM, route, weights.product))
        return out_RM, SavedSlice(segment, weights)

    def unorder(self, task: Task, inputs: Inputs) -> Outcome:
        m = _microbatch(task)
        block = self.model.parts[task.layer]
        attended: Attended = inputs[Task(task.layer, Op.ATTENTION, F, m)]
        home = self.shape.combine[-1]
        chunks = range(self.shape.chunks)
        rows_RM = joined([rows for c in chunks for rows in inputs[Task(task.layer, home, F, m, c)]])
        shared = [inputs[Task(task.layer, Op.SHARED, F, m)]] if self.shape.shared_experts else []
        segment = self.segment()
        residual_BLM, weights, rows_RM, *shared = segment.enter(
            attended.residual_BLM, attended.weights, rows_RM, *shared
        )
        assert block.moe is not None, task
        with self.autocast():
            out_TM = block.moe.unorder(rows_RM, weights, attended.plan, *shared)
            (out_BLM,) = segment.leave(block.add(residual_BLM, out_TM, self.batch.keys[m]))
        return Outcome(out_BLM, segment)

    def head(self, task: Task, inputs: Inputs) -> Outcome:
        m = _microbatch(task)
        labels_BL = self.batch.labels[m]
        segment = self.segment()
        (h_BLM,) = segment.enter(inputs[block_output(self.shape.last, m, self.shape)])
        with self.autocast():
            (loss,) = segment.leave(self.model.head(h_BLM, labels_BL))
        sums = HeadSums(loss, (labels_BL >= 0).sum(), self._tokens(m))
        return Outcome(sums, SavedHead(segment, loss.dtype))

    def _tokens(self, m: int) -> Tensor | int:
        """Tokens of a microbatch that are not padding."""
        return self.batch.tokens[m].numel() if self.batch.valid is None else self.batch.valid[m].sum()

    def head_backward(self, task: Task, inputs: Inputs) -> Outcome:
        statistics: StepStatistics = inputs[statistics_task(self.shape)]
        saved: SavedHead = inputs[Task(task.layer, Op.HEAD, F, task.microbatch)]
        slope = (self.loss_gradient / statistics.valid).to(saved.loss_dtype)
        (grad_BLM,) = saved.segment.backward([slope])
        return Outcome(grad_BLM)

    def unorder_backward(self, task: Task, inputs: Inputs) -> Outcome:
        segment: AnySegment = inputs[Task(task.layer, Op.UNORDER, F, task.microbatch)]
        grads = segment.backward([inputs[block_gradient(task.layer, _microbatch(task), self.shape)]])
        residual_BLM, weights, rows_RM, *shared = grads
        assert residual_BLM is not None and rows_RM is not None, task
        return Outcome(UnorderGradients(residual_BLM, weights, rows_RM, *(shared or [None])))

    def experts_backward(self, task: Task, inputs: Inputs) -> Outcome:
        saved = self._take_slices(task, inputs)
        grads = inputs[Task(task.layer, self.shape.combine[0], B, task.microbatch, task.chunk)]
        rows = [
            _present(left.segment.backward([grad_RM]))[0] for left, grad_RM in zip(saved, grads, strict=True)
        ]
        return Outcome(ExpertGradient(tuple(rows), tuple(left.weights for left in saved)))

    def _take_slices(self, task: Task, inputs: Inputs) -> list[SavedSlice]:
        """What X.F left of the slices of a backward chunk; taken out, or a forward chunk that several of
        them share would hold all until the last has run."""
        assert task.chunk is not None, task
        found: list[SavedSlice] = []
        for s in self.shape.slices_of(task.chunk, task.phase):
            holder = s * self.shape.chunks // self.shape.slices
            left: dict[int, SavedSlice] = inputs[Task(task.layer, Op.EXPERTS, F, task.microbatch, holder)]
            found.append(left.pop(s))
        return found

    def experts_weights(self, task: Task, inputs: Inputs) -> Outcome:
        """What I put off: needs nothing but what I left, and nothing but the update needs it."""
        made: ExpertGradient = inputs[Task(task.layer, Op.EXPERTS, INPUT, task.microbatch, task.chunk)]
        for weights in made.weights:
            weights.compute()
        return Outcome(None)

    def attention_backward(self, task: Task, inputs: Inputs) -> Outcome:
        m = _microbatch(task)
        saved = inputs[Task(task.layer, Op.ATTENTION, F, m)]
        if isinstance(saved, SavedAttention):
            grads = saved.segment.backward(self._attention_gradients(task, saved, inputs))
        else:
            grads = saved.backward([inputs[block_gradient(task.layer, m, self.shape)]])
        return Outcome(_present(grads)[0])

    def _attention_gradients(self, task: Task, saved: SavedAttention, inputs: Inputs) -> list[Tensor | None]:
        """Gradients of all that AT.F left, in that order; None for what nothing came back."""
        m, statistics = _microbatch(task), inputs[statistics_task(self.shape)]
        unordered: UnorderGradients = inputs[Task(task.layer, Op.UNORDER, B, m)]
        first = self.shape.dispatch[0]
        chunks = range(self.shape.backward_chunks)
        rows_RM = joined([rows for c in chunks for rows in inputs[Task(task.layer, first, B, m, c)]])
        y = sum(self.shape.moe_layers[: task.layer])
        slope_BE = self.balance.slope(saved.chosen_BE, statistics.chosen_YE[y], statistics.tokens)
        slope_z = self.moe.z_loss_coeff / statistics.tokens
        shared = inputs[Task(task.layer, Op.SHARED, B, m)] if self.shape.shared_experts else None
        return [
            unordered.residual_BLM,
            rows_RM,
            unordered.weights,
            self.loss_gradient * self.moe.aux_loss_coeff * slope_BE,
            self.loss_gradient * slope_z,
            shared,
        ]

    def embed_backward(self, task: Task, inputs: Inputs) -> Outcome:
        segment: AnySegment = inputs[Task(0, Op.EMBED, F, task.microbatch)]
        segment.backward([inputs[Task(0, Op.ATTENTION, B, task.microbatch)]])
        return Outcome(None)


def find_routes(task: Task, inputs: Inputs, shape: StepShape) -> Routes:
    """The routes of a task's microbatch: from the count exchange, or from AT where sizes are fixed."""
    found: HostRoutes | Attended | SavedAttention = inputs[routing(task.layer, _microbatch(task), shape)]
    assert found.routes is not None, task
    return found.routes


def _microbatch(task: Task) -> int:
    assert task.microbatch is not None, task
    return task.microbatch


def _present(grads: Sequence[Tensor | None]) -> list[Tensor]:
    assert all(grad is not None for grad in grads), "every input of a segment must reach its outputs"
    return [grad for grad in grads if grad is not None]
