"""`PipelinedStack`: a whole model whose step runs by a schedule, as one ordinary `nn.Module`.

loss = stack(tokens_BL, labels_BL)   # runs the forward tasks
loss.backward()                      # runs the backward tasks; every gradient is synchronised after it
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from penstock.decision import GradientBytes
from penstock.features.dispatch import find_dispatch
from penstock.graph import Lane
from penstock.mesh import Group
from penstock.moe import MoELayer, RouteMaker
from penstock.moe.build import build_permutation
from penstock.moe.config import MoEConfig
from penstock.moe.layer import count_updates
from penstock.moe.routers import BALANCES, Balance
from penstock.partial_state import mark_held, mark_states_of_shards, refuse_pickle
from penstock.runtime.batch import (
    NO_LABEL,
    SampleNumbers,
    Samples,
    Sizes,
    check_sizes,
    check_tensors,
    equal_sizes,
    with_documents,
)
from penstock.runtime.bounds import bounds_of
from penstock.runtime.buckets import Buckets
from penstock.runtime.clip import ExpertRanks, mark_experts
from penstock.runtime.consistency import Consistency, Turns, check_agreement
from penstock.runtime.endings import HiddenStates, SharedTokens, StepStates
from penstock.runtime.executor import Program, Programs, Times
from penstock.runtime.expert_parallel.guard import check_not_sharded
from penstock.runtime.expert_parallel.optimizers import watch_optimizers
from penstock.runtime.features import features_of
from penstock.runtime.features.expert_replicas.manager import ExpertMoving
from penstock.runtime.features.sample_placement import SampleMoving
from penstock.runtime.gradients import Gradients, OutsideGradients
from penstock.runtime.handlers import HANDLERS, Ending, TensorPlace
from penstock.runtime.machinery import Machinery, StackFeature
from penstock.runtime.ops import TokenLoss
from penstock.runtime.parts import (
    ModelParts,
    check_layers,
    check_not_moved,
    check_placements,
    check_planned_for,
    check_same,
    check_shards,
    maker_of,
    placements_of,
    refuse_data_parallel,
    refuse_stale,
    shape_of,
    sharing_of,
    watch_model,
)
from penstock.runtime.statistics import LoadHistory, StatisticsCodec, StepStatistics
from penstock.runtime.step import (
    Step,
    Taken,
    check_no_checkpoint,
    check_no_data_parallel,
    check_no_second_derivative,
    check_no_transform,
)
from penstock.schedule import StepPlan
from penstock.sharding import mark_shards
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS, Updating
from penstock.trace import TaskRecord

Part = TypeVar("Part", bound=StackFeature)


class PipelinedStack(nn.Module):
    """Runs a model by a step plan. `plan` may be exchanged between steps; parameters stay where they are.

    Parameters are those of `model`, which may be frozen, converted, replaced or added between two steps, on
    all ranks alike. Layers cannot be added or change their kind. A copy (`copy.deepcopy`) has a model of its
    own and runs on the same machinery. Expert parameters carry `allreduce = False`, as Megatron and DeepSpeed
    mark them: they belong to this rank (and to the `edp` replicas), not to everybody.

    Args:
        parts: The model in pieces; usually `model` itself.
        make_plan: Makes a plan for the shape of a step and the bytes of gradients.
        seed: The seed of dropout.
        moving: How the replicas of the next step are planned, where the plan has replica slots.
        sample_moving: How samples get new homes, where they move.
        gathers_loads: Whether steps gather how often tokens of each rank chose each expert, see `loads`.
        updating: How steps update parameters themselves, for a `ShardedAdamW`; None: they do not.

    Attributes:
        timed: Whether the next steps measure when their tasks run, which on a GPU costs two events for each.
    """

    parts: ModelParts

    def __init__(
        self,
        model: nn.Module,
        parts: ModelParts,
        moe: MoEConfig,
        machinery: Machinery,
        make_plan: Callable[[StepShape, GradientBytes], StepPlan],
        *,
        seed: int = 0,
        moving: ExpertMoving | None = None,
        sample_moving: SampleMoving | None = None,
        gathers_loads: bool = False,
        updating: Updating | None = None,
    ) -> None:
        super().__init__()
        count_updates()
        self.model, self.moe, self.machinery, self.seed = model, moe, machinery, seed
        edp = machinery.layout.edp_size > 1
        self._updating = None if updating is None else replace(updating, edp=edp)
        self._gathers_loads = gathers_loads
        self.features = features_of(
            machinery.layout,
            machinery.device,
            moving=moving,
            sample_moving=sample_moving,
            updating=self._updating,
        )
        self.register_state_dict_pre_hook(refuse_stale)
        watch_model(model, self)
        watch_optimizers()
        # Usually `parts` is `model` itself: registered a second time, every parameter would have two names.
        object.__setattr__(self, "parts", parts)
        check_shards(model, parts, machinery.layout)
        mark_states_of_shards(model)
        self._shape = self._checked_shape()
        self._placements = check_placements(placements_of(self.moe_layers), machinery.control)
        self.balance = BALANCES[moe.aux_loss_group]
        self.codec = StatisticsCodec(moe, self.balance)
        self._ending: Callable[[], Ending] = TokenLoss
        self.turns = Turns(machinery.control)
        self.gradients = Gradients(model, parts, machinery.layout, machinery.device, self._shape)
        self.consistency = Consistency(self.gradients, machinery)
        self.outside = OutsideGradients(self.gradients, machinery)
        self._expert_ranks = ExpertRanks(machinery.layout, machinery.transports.inter, machinery.device)
        # These belong to the step that ran last: a backward pass shows its own step again.
        self.times: Times | None = None
        self.statistics: StepStatistics | None = None
        self.timed = True
        self.loads = LoadHistory()
        self._numbers = SampleNumbers(machinery.layout)
        self.replan_request = ""
        self._make_plan = make_plan
        twice = {key: handler for f in self.features.values() for key, handler in f.twice(HANDLERS).items()}
        self._programs = Programs(HANDLERS, machinery.layout.mesh.silent, twice)
        self.bounds = bounds_of(self.moe_layers)
        self.mark_experts()
        self.plan = self.adopt(make_plan(self.base_shape, self.gradients.sizes_bytes))

    def adopt(self, plan: StepPlan) -> StepPlan:
        """Use `plan` from the next step on.

        After an error the stack keeps its plan. A feature may refuse a plan with an error of its own.

        Raises:
            ValueError: If the plan is for other layers.
            ScheduleError: If its schedule does not fit its graph.
            ScheduleMismatchError: On all ranks, if their plans differ.
        """
        check_planned_for(plan.shape, self._shape)
        features = self.features.values()
        for feature in features:
            feature.leave(self)
        plan.schedule.check(plan.graph)
        check_agreement(plan, self.machinery.control)
        self.machinery.transports.open((task.lane, task.axes) for task in plan.graph.tasks if task.axes)
        # All that may refuse the plan comes first: the plan before it must stay whole.
        for feature in features:
            feature.check(plan, self)
        makers = self._route_makers(plan.shape)
        for feature in features:
            feature.adopt(plan, self)
        self.makers, self.plan = makers, plan
        return plan

    def of(self, kind: type[Part]) -> Part:
        """Return the part that a feature has in this stack, by its class."""
        feature = self.features[kind]
        assert isinstance(feature, kind), kind
        return feature

    def send_by(self, name: str) -> None:
        """Let rows travel by the dispatch of this name, on all ranks, in the plan that is adopted next."""
        dispatch, layout = find_dispatch(name), self.machinery.layout
        self.moe = replace(self.moe, dispatch=name)
        for layer in self.moe_layers:
            if layer is None or layer.dispatch is dispatch:
                continue
            order = layer.permutation
            if dispatch.joins_rows or layer.dispatch.joins_rows:
                size, rank = layout.ep_size, layout.ep_rank
                order = build_permutation(self.moe, size, ep_rank=rank, node_size=layout.ep_node_size)
            layer.send_by(dispatch, order)
        self._shape = self._checked_shape()

    def program(self, *, training: bool) -> Program:
        """Return the plan, compiled for training or for the forward half alone.

        Raises:
            ScheduleError: If no handler can run a task.
        """
        return self._programs.of(self.plan, training=training)

    def taken(self, *, training: bool) -> Taken:
        """Return what a step that begins now takes."""
        return Taken(
            plan=self.plan,
            program=self.program(training=training),
            machinery=self.machinery,
            makers=self.makers,
            moe=self.moe,
            balance=self.balance,
            codec=self.codec,
            buckets=self.buckets,
            snapshot=self.gradients.snapshot,
            seed=self.seed,
            features=tuple(part for feature in self._active if (part := feature.step(self)) is not None),
        )

    def replan(self) -> StepPlan:
        """Plan again for the parameters that are trained now; every rank must call it.

        Worthwhile after much was frozen or thawed: a plan reckons with the gradients that existed when it was
        made.
        """
        self.gradients.prepare()
        return self.adopt(self._make_plan(self.base_shape, self.gradients.sizes_bytes))

    @property
    def buckets(self) -> Buckets:
        """The gradients of trained parameters, by the layer that they are reduced with."""
        return self.gradients.buckets

    @_disable_dynamo  # a compiler would look into the whole schedule, for minutes
    def forward(
        self,
        tokens_BL: Tensor,
        labels_BL: Tensor,
        sample_ids_B: Tensor | None = None,
        valid_BL: Tensor | None = None,
        *,
        largest_batch: int | None = None,
        documents_BL: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the whole batch of all ranks, the same on every rank; float64 scalar.

        In training mode with gradients enabled, backward follows.

        Args:
            tokens_BL, labels_BL: int64 [B, L]; a label of -100 counts for nothing. Ranks may have batches of
                different sizes, or empty ones; without a valid label anywhere only balance and z terms are
                left.
            sample_ids_B: Numbers of the samples, unique over the run: keys of dropout; None: they are
                counted.
            valid_BL: bool [B, L], False for padding; None if there is none.
            largest_batch: Samples of the largest batch of any rank, the same on all ranks, for routing with
                fixed slots; without it, ranks ask each other.
            documents_BL: int64 [B, L], where every token's document begins; a token attends to no other
                document.

        Raises:
            ValueError: If a change of the model cannot be taken up.
            ParameterMismatchError: If a change is not the same on all ranks.
        """
        training = torch.is_grad_enabled() and self.training
        given = self._given(tokens_BL, labels_BL, sample_ids_B, valid_BL, documents_BL, training=training)
        if largest_batch is None:
            check_sizes(tokens_BL, self.machinery.layout, self.machinery.control)
        sizes = self._sizes
        settled = given if sizes is None else sizes(given, largest_batch)
        batch = settled.cut(self.plan.shape.microbatches, self.seed)
        step = Step(self, batch, training, self._ending())
        if not training:
            with torch.no_grad():
                return _forward(step)[1][0]
        loss: Tensor
        (loss,) = _StepFunction.apply(step, torch.empty(0, device="cpu", requires_grad=True))
        return loss

    def hidden_states(
        self,
        tokens_BL: Tensor,
        sample_ids_B: Tensor | None = None,
        *,
        averaged: bool,
    ) -> StepStates:
        """Return hidden states after the last layer, and what routers hand out, for a loss of the caller's.

        The forward half of a training step runs up to the head; the backward pass of any loss of what is
        returned runs the backward half. What comes after the layers is the caller's: its gradients are summed
        over ranks with those of the step. All ranks call it, and every rank's loss must depend on the hidden
        states.

        Args:
            tokens_BL, sample_ids_B: See `forward`.
            averaged: Whether gradients are averaged over ranks, as DistributedDataParallel does; otherwise
                they are summed.

        Raises:
            ValueError: As `forward` does, and where ranks need batches of one size or samples move.
        """
        if self._sizes is not None:
            raise ValueError(
                "a loss of one's own, on hidden states, with samples that move (placement.samples) or a "
                "fixed number of slots (moe.capacity_factor): what comes home has other samples. Give labels"
            )
        labels_BL = torch.full_like(tokens_BL, NO_LABEL, dtype=torch.int64)
        given = self._given(tokens_BL, labels_BL, sample_ids_B, None, None, training=True)
        check_sizes(tokens_BL, self.machinery.layout, self.machinery.control)
        batch = given.cut(self.plan.shape.microbatches, self.seed)
        layout = self.machinery.layout
        meet = partial(self._meet, self.turns.last, self.moe.aux_loss_coeff > 0)
        split = FORM_TOKENS[self.plan.shape.expert_form] == "split"
        tokens = SharedTokens(TensorPlace(layout.tp_rank, layout.tp_size), split, self.machinery.transports)
        averaged_over, ranks = layout.dp_size if averaged else 1, layout.dp_size
        ending = HiddenStates(averaged=averaged_over, ranks=ranks, tokens=tokens, meet=meet)
        hidden_BLM, balance, *routers = _StepFunction.apply(
            Step(self, batch, True, ending), torch.empty(0, device="cpu", requires_grad=True)
        )
        return StepStates(hidden_BLM, balance, tuple(routers))

    def _meet(self, number: int, balanced: bool, slope: Tensor) -> Tensor:
        """Return the mean over ranks of the gradient of the balance loss, which each rank's loss may weigh.

        Raises ScheduleMismatchError, on all ranks, unless all begin the backward half of the same step. With
        other transfers than its peers' a rank would end in a collective that does not match.
        """
        machinery = self.machinery
        self.turns.backward(number)
        if not balanced:
            return slope
        total, transports = slope.clone(), machinery.transports
        transports.open([(Lane.INTER, Group.WORLD)])
        machinery.exchange(
            "summing the gradient of the balance loss",
            lambda: transports.of(Lane.INTER, Group.WORLD).all_reduce(total, Group.WORLD),
        )
        return total / machinery.layout.world_size

    def _given(
        self,
        tokens_BL: Tensor,
        labels_BL: Tensor,
        ids_B: Tensor | None,
        valid_BL: Tensor | None,
        documents_BL: Tensor | None,
        *,
        training: bool,
    ) -> Samples:
        """Return the samples of a step that begins now, on the device; what has changed is taken up."""
        if training:
            for feature in self._active:
                feature.check_training()
            check_no_checkpoint()
            check_no_transform()
            check_no_data_parallel(self.model)
        self.consistency.read_late()
        self._take_up_changes()
        check_tensors(tokens_BL, labels_BL, ids_B, valid_BL)
        if ids_B is None:
            ids_B = self._numbers.take(len(tokens_BL), tokens_BL.device, training=training)
        samples = Samples(tokens_BL, labels_BL, ids_B, valid_BL)
        return with_documents(samples, documents_BL, self.parts).to(self.machinery.device)

    @contextmanager
    def requesting_replan(self, why: str) -> Iterator[None]:
        """Ask, in forward passes inside, whether all ranks need another plan.

        Others may be training meanwhile. Such passes do not need the plan to reduce the parameters that are
        trained now.

        Args:
            why: Why this rank needs one, in words.

        Raises:
            ScheduleMismatchError: On every rank, if not all ranks ask.
        """
        self.replan_request = why
        try:
            with torch.no_grad():
                yield
        finally:
            self.replan_request = ""

    def minimise(
        self,
        moe: MoEConfig,
        balance: Balance,
        valid: float | None = None,
        ending: Callable[[], Ending] = TokenLoss,
    ) -> None:
        """Make the loss of the next steps of these terms; the same on all ranks.

        Args:
            moe: The configuration whose coefficients weigh the balance and z terms.
            balance: How the balance of experts is judged.
            valid: The number by which the sum of all ranks' token losses is divided; None: the number of
                valid tokens.
            ending: Makes what a step with labels ends with.
        """
        self.moe, self.balance, self._ending = moe, balance, ending
        self.codec = StatisticsCodec(moe, balance, valid)

    def compute_in(self, autocast_dtype: torch.dtype | None) -> None:
        """Compute next steps under autocast in this type.

        Args:
            autocast_dtype: The type; None: next steps compute without autocast.

        Raises:
            ValueError: If rows must stay exact.
        """
        if autocast_dtype != self.machinery.autocast_dtype:
            for feature in self.features.values():
                feature.check_dtype(autocast_dtype, self)
            self.machinery = replace(self.machinery, autocast_dtype=autocast_dtype)

    def compare_values(self) -> None:
        """Raise ParameterMismatchError, on all ranks, if they hold different values of what they share.

        Parameters, buffers and replicas of experts are compared, as training steps do at times. All ranks
        call it.
        """
        refuse_stale(self)
        self.consistency.compare()

    def records(self, step: int = 0) -> list[TaskRecord]:
        """Return when every task of the last step ran on this rank; [] on a GPU if that was not `timed`."""
        return self.times.records(step) if self.times else []

    def settle(self) -> None:
        """Take up changes to the model and the plan, also in the shares of a sharded optimiser.

        All ranks must call it; a step does so by itself.
        """
        self._take_up_changes()
        for feature in self.features.values():
            feature.settle(self)

    def close(self) -> None:
        """End the machinery: its threads and connections, also for other stacks and copies that run on it."""
        self.machinery.close()

    def mark_experts(self) -> None:
        """Mark experts and parts of parameters: which they are, and the ranks that hold the others."""
        for layer, moe in enumerate(self.moe_layers):
            stacked = moe is not None and moe.experts.stacked
            mark_experts(self.parts.expert_parameters(layer), self._expert_ranks, stacked=stacked)
        mark_shards(self.model, self._expert_ranks)
        mark_held(self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a stack with a copy of the model, on the same machinery: for averages of weights, say."""
        refuse_stale(self)
        for kept in (self._make_plan, self.plan, self._programs):
            memo[id(kept)] = kept
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        of_a_step = dict.fromkeys(("times", "statistics", "gradients", "features", "consistency", "outside"))
        copied.__dict__.update(
            copy.deepcopy({**self.__dict__, **of_a_step}, memo),
            features={kind: feature.copy() for kind, feature in self.features.items()},
        )
        machinery = self.machinery
        layout, device = machinery.layout, machinery.device
        copied.gradients = Gradients(copied.model, copied.parts, layout, device, copied._shape)
        copied.consistency = Consistency(copied.gradients, machinery)
        copied.outside = OutsideGradients(copied.gradients, machinery)
        watch_model(copied.model, copied)
        copied.mark_experts()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_pickle("a PipelinedStack (its `model` can)")

    def _replicate_for_data_parallel(self) -> Any:
        return refuse_data_parallel()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """The first attribute that DistributedDataParallel asks of a module; asking raises TypeError."""
        return refuse_data_parallel()

    def _take_up_changes(self) -> None:
        """Take up changes made to the model since the last step."""
        if self.model is not self.gradients.model:
            raise ValueError(
                "stack.model was replaced, and the stack still runs the model that it was built with: change "
                "modules inside that one, or build a new stack."
            )
        if not self.gradients.holds(self.plan.shape):
            check_not_sharded(self.model)
            check_same(self._checked_shape(), self._shape)
            check_not_moved(placements_of(self.moe_layers), self._placements)
            for feature in self.features.values():
                feature.check_layers(self)
            self.makers = self._route_makers(self.plan.shape)
            self.mark_experts()
            if not self.replan_request:
                self.gradients.renew(self.plan.shape)

    def _checked_shape(self) -> StepShape:
        """Return the uncut shape of a step of the present layers."""
        check_layers(self.moe_layers, self.moe, self.machinery.layout)
        sharing = sharing_of(self.machinery.layout, self.moe.aux_loss_group)
        return shape_of(self.moe_layers, sharing, gathers_loads=self._gathers_loads, updating=self._updating)

    @property
    def moe_layers(self) -> list[MoELayer | None]:
        return [part.moe for part in self.parts.parts]

    @property
    def _active(self) -> list[StackFeature]:
        """The features that take part in steps of the present plan."""
        return [feature for feature in self.features.values() if feature.active]

    @property
    def _sizes(self) -> Sizes | None:
        """How ranks deal with batches of different sizes; None: each runs the samples that it has."""
        for feature in self._active:
            if (sizes := feature.sizes(self)) is not None:
                return sizes
        fixed = any(layer is not None and layer.permutation.counts_slots for layer in self.moe_layers)
        return partial(equal_sizes, self.machinery.control) if fixed else None

    @property
    def base_shape(self) -> StepShape:
        """The uncut shape of a step, before a system transforms it."""
        shape = self._shape
        for feature in self.features.values():
            shape = feature.shape(shape, self)
        return shape

    def _route_makers(self, shape: StepShape) -> list[RouteMaker | None]:
        layout = self.machinery.layout
        return [None if moe is None else maker_of(moe, layout, shape.expert_form) for moe in self.moe_layers]


class _StepFunction(torch.autograd.Function):
    """Represents a whole step by one autograd node. Its tasks accumulate the gradients of parameters."""

    @staticmethod
    def forward(ctx: Any, step: Step, anchor: Tensor) -> tuple[Tensor, ...]:
        del anchor  # its only use is to make what a step returns differentiable
        ctx.step, outputs = _forward(step)
        return outputs

    @staticmethod
    @_disable_dynamo  # a compiled function that calls `backward` would compile what the tasks run
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        check_no_second_derivative()
        ctx.step.backward(*grads)
        return None, None


def _forward(step: Step) -> tuple[Step, tuple[Tensor, ...]]:
    """Run a step's forward half, again if a rank had too few rows; return what ran last, and its outputs."""
    outputs = step.forward()
    if step.must_repeat:
        step = step.again()
        outputs = step.forward()
    return step, outputs
