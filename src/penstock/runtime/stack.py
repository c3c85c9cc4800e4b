"""`PipelinedStack`: a whole model whose step runs by a schedule, as one ordinary `nn.Module`.

loss = stack(tokens_BL, labels_BL)   # runs the forward tasks
loss.backward()                      # runs the backward tasks; every gradient is synchronised after it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.dispatch import Place
from penstock.graph import StepShape
from penstock.moe import MoELayer, RouteMaker
from penstock.moe.balance import BALANCES
from penstock.moe.config import MoEConfig
from penstock.runtime.agree import check_agreement
from penstock.runtime.batch import AnySizes, EqualSizes, SampleNumbers, Samples, Sizes
from penstock.runtime.buckets import GradientBucket
from penstock.runtime.communicate import Buckets, CommunicationHandlers
from penstock.runtime.compute import Batch, ComputeHandlers
from penstock.runtime.executor import Execution
from penstock.runtime.lanes import Lanes
from penstock.runtime.parts import ModelParts
from penstock.runtime.segment import PassThrough, Segment
from penstock.runtime.statistics import StatisticsCodec, StepStatistics
from penstock.runtime.transport import Transports
from penstock.schedule import StepPlan
from penstock.topology import Control, Layout
from penstock.trace import TaskRecord


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """What a stack runs on. control: all ranks, for checks outside the step."""

    lanes: Lanes
    transports: Transports
    layout: Layout
    control: Control
    device: torch.device
    autocast_dtype: torch.dtype | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None
        )


class PipelinedStack(nn.Module):
    """Runs a model by a step plan. `plan` may be exchanged between steps; parameters stay where they are.

    Parameters are those of `model`. Expert parameters carry `allreduce = False`, as Megatron and DeepSpeed
    mark them: they belong to this rank (and to the `edp` replicas), not to everybody.
    """

    parts: ModelParts

    def __init__(
        self,
        model: nn.Module,
        parts: ModelParts,
        moe: MoEConfig,
        machinery: Machinery,
        make_plan: Callable[[StepShape, tuple[int, ...], tuple[int, ...]], StepPlan],
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.moe, self.machinery, self.seed = model, moe, machinery, seed
        # Usually `parts` is `model` itself: registered a second time, every parameter would have two names.
        object.__setattr__(self, "parts", parts)
        _check_layers([part.moe for part in parts.parts], moe, machinery.layout)
        self.balance = BALANCES[moe.aux_loss_group]
        self.codec = StatisticsCodec(moe, self.balance)
        self.buckets, self.makers = self._build_buckets(), self._route_makers()
        # Of the step that ran last: after a backward pass of its own step, whatever ran since its forward.
        self.execution: Execution | None = None
        self.statistics: StepStatistics | None = None
        self._numbers = SampleNumbers(machinery.layout)
        shape = self.base_shape
        fixed = any(shape.moe_layers) and not shape.exchange_counts
        self._sizes: Sizes = EqualSizes(machinery.control) if fixed else AnySizes()
        self.plan = self.adopt(make_plan(self.base_shape, *self.buckets.sizes_bytes))

    def adopt(self, plan: StepPlan) -> StepPlan:
        """Use `plan` from the next step on. Raises ScheduleMismatchError if the ranks' orders differ."""
        plan.schedule.check(plan.graph)
        check_agreement(plan.schedule, self.machinery.control)
        self.plan = plan
        return plan

    def forward(
        self,
        tokens_BL: Tensor,
        labels_BL: Tensor,
        sample_ids_B: Tensor | None = None,
        valid_BL: Tensor | None = None,
        *,
        largest_batch: int | None = None,
    ) -> Tensor:
        """The loss of the whole batch of all ranks, the same on every rank; float64 scalar.

        tokens_BL, labels_BL: int64 [B, L]; a label of -100 counts for nothing. Ranks may have batches of
        different sizes, or of none; without a valid label anywhere only balance and z terms are left.
        sample_ids_B: unique over the run, keys of dropout (default: counted). largest_batch: samples of the
        largest batch of any rank, the same on all of them, for routing with fixed slots, where ranks else
        ask each other. In training mode with gradients enabled, backward follows.
        """
        training = torch.is_grad_enabled() and self.training
        given = self._samples(tokens_BL, labels_BL, sample_ids_B, valid_BL, training)
        batch = self._sizes.settle(given, largest_batch).cut(self.plan.graph.shape.microbatches, self.seed)
        step = _Step(self, batch, training)
        if not training:
            with torch.no_grad():
                return step.forward()
        loss: Tensor = _StepFunction.apply(step, torch.empty(0, requires_grad=True))
        return loss

    def records(self, step: int = 0) -> list[TaskRecord]:
        """When every task of the last step ran on this rank."""
        return self.execution.records(step) if self.execution else []

    def close(self) -> None:
        """End the lanes' threads."""
        self.machinery.lanes.close()

    def _samples(
        self,
        tokens_BL: Tensor,
        labels_BL: Tensor,
        ids_B: Tensor | None,
        valid_BL: Tensor | None,
        training: bool,
    ) -> Samples:
        if tokens_BL.dim() != 2 or labels_BL.shape != tokens_BL.shape:
            shapes = f"{list(tokens_BL.shape)} and {list(labels_BL.shape)}"
            raise ValueError(f"tokens and labels must both be [samples, tokens per sample], not {shapes}")
        if ids_B is None:
            ids_B = self._numbers.take(len(tokens_BL), tokens_BL.device, training=training)
        return Samples(tokens_BL, labels_BL, ids_B, valid_BL)

    @property
    def base_shape(self) -> StepShape:
        """The uncut shape of a step, before a system transforms it."""
        return shape_of([part.moe for part in self.parts.parts])

    def _route_makers(self) -> list[RouteMaker | None]:
        return [
            None
            if part.moe is None
            else RouteMaker(part.moe.dispatch, self._place, part.moe.order.row_counts)
            for part in self.parts.parts
        ]

    @property
    def _place(self) -> Place:
        layout = self.machinery.layout
        return Place(layout.ep_rank, layout.ep_size, layout.ep_node_size)

    def _build_buckets(self) -> Buckets:
        layers = range(len(self.parts.parts))
        experts: list[GradientBucket] = []
        for layer in layers:
            parameters = self.parts.expert_parameters(layer)
            for parameter in parameters:
                parameter.allreduce = False  # type: ignore[attr-defined]  # the tag that other tools read
            experts.append(GradientBucket(parameters if self.machinery.layout.edp_size > 1 else []))
        replicated = [GradientBucket(self.parts.replicated_parameters(layer)) for layer in layers]
        return Buckets(replicated=replicated, experts=experts)


def _check_layers(layers: Sequence[MoELayer | None], moe: MoEConfig, layout: Layout) -> None:
    """Layers that a user built must be what the configuration and the layout say."""
    for number, layer in enumerate(layers):
        if layer is None:
            continue
        for what, found, wanted in (
            ("num_experts", layer.num_experts, moe.num_experts),
            ("ep_size", layer.ep_size, layout.ep_size),
        ):
            if found != wanted:
                why = f"layer {number} was built with {what} = {found}, the stack with {wanted}"
                raise ValueError(f"{why}: build the layer with the stack's {what}")


def shape_of(layers: Sequence[MoELayer | None]) -> StepShape:
    """The uncut shape of a step of these layers (None: a dense one); they need the same kinds of tasks."""
    moe = [layer for layer in layers if layer is not None]
    if not moe:
        return StepShape(moe_layers=(False,) * len(layers))
    dynamic = {layer.order.dynamic for layer in moe}
    legs = {layer.dispatch.ops for layer in moe}
    shared = {layer.shared is not None for layer in moe}
    for what, found in (("order", dynamic), ("dispatch", legs), ("shared experts", shared)):
        if len(found) > 1:
            raise ValueError(f"all MoE layers of a stack need the same kind of {what}: their tasks are alike")
    return StepShape(
        moe_layers=tuple(layer is not None for layer in layers),
        exchange_counts=dynamic.pop(),
        dispatch=legs.pop(),
        shared_experts=shared.pop(),
    )


class _Step:
    """One iteration: its handlers and its execution."""

    def __init__(self, stack: PipelinedStack, batch: Batch, training: bool) -> None:
        self.stack, self.training, self.finished = stack, training, False
        machinery, shape = stack.machinery, stack.plan.graph.shape
        self.compute = ComputeHandlers(
            stack.parts,
            shape,
            batch,
            stack.moe,
            stack.makers,
            stack.balance,
            partial(Segment, machinery.device) if training else PassThrough,
            machinery.autocast,
            machinery.autocast_dtype,
        )
        self.communicate = CommunicationHandlers(
            machinery.transports, stack.makers, shape, stack.buckets, stack.codec
        )
        handlers = {**self.compute.table(), **self.communicate.table()}
        self.execution = Execution(
            stack.plan, machinery.lanes, handlers, machinery.layout.rank, training=training
        )

    def forward(self) -> Tensor:
        # Inside an autograd.Function gradients are off; segments need them for their own graphs.
        with torch.set_grad_enabled(self.training):
            self.execution.run(forward=True)
        statistics = self.communicate.total
        assert statistics is not None, "the statistics task has run"
        self._show(statistics)
        return statistics.loss

    def _show(self, statistics: StepStatistics) -> None:
        """What the stack tells about: the step that ran last, forward or backward, whichever came before."""
        self.stack.execution, self.stack.statistics = self.execution, statistics

    def backward(self, loss_gradient: Tensor) -> None:
        if self.finished:
            raise RuntimeError("backward of this loss has run already: compute a new loss for every backward")
        self.finished = True
        self.compute.loss_gradient = loss_gradient
        buckets = (*self.stack.buckets.replicated, *self.stack.buckets.experts)
        for bucket in buckets:
            bucket.begin()
        self.execution.run(forward=False)
        for bucket in buckets:
            bucket.finish()
        for layer in range(len(self.stack.parts.parts)):
            _fill_missing(self.stack.parts.expert_parameters(layer))
        statistics = self.communicate.total
        assert statistics is not None, "backward follows this step's forward"
        self._count_choices(statistics)
        self._show(statistics)

    def _count_choices(self, statistics: StepStatistics) -> None:
        """Tell gates with a bias what this step has trained on; the same on all ranks."""
        layers = [part.moe for part in self.stack.parts.parts if part.moe is not None]
        for moe, chosen_E in zip(layers, statistics.chosen_YE, strict=True):
            if moe.gate.bias is not None:
                moe.gate.bias.count(chosen_E)


class _StepFunction(torch.autograd.Function):
    """Puts a whole step behind one autograd node. Gradients of parameters are accumulated by its tasks."""

    @staticmethod
    def forward(ctx: Any, step: _Step, anchor: Tensor) -> Tensor:
        del anchor  # its only use is to make the loss differentiable
        ctx.step = step
        return step.forward()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.step.backward(grads[0])
        return None, None


def _fill_missing(parameters: Sequence[nn.Parameter]) -> None:
    """An expert that saw no token has a gradient all the same: zero."""
    for parameter in parameters:
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
