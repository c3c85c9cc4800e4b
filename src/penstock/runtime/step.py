"""One iteration of a stack: what its handlers work on, and its two halves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.device import device_of
from penstock.moe import MoEConfig, MoELayer
from penstock.moe.balance import Balance
from penstock.moe.products import AutogradWeights, ComputeCopies, WeightGradients
from penstock.routing.routes import RouteMaker
from penstock.runtime.bounds import Counted, RowBounds
from penstock.runtime.checks.consistency import Consistency
from penstock.runtime.checks.forward_state import ForwardState
from penstock.runtime.checks.usage import raise_replaced
from penstock.runtime.executor import Execution
from penstock.runtime.features.expert_replicas.manager import NextReplicas, ReplicaManager
from penstock.runtime.features.sample_placement.moving import Relocation
from penstock.runtime.features.sample_placement.packed_residual import PackedResidual
from penstock.runtime.features.sharded_optimizer.updates import Updates
from penstock.runtime.features.sharded_optimizer.usage import refuse_left_out
from penstock.runtime.fingerprints import Snapshot
from penstock.runtime.gradients.buckets import Buckets
from penstock.runtime.gradients.in_place import BackwardPass
from penstock.runtime.gradients.model_gradients import Gradients
from penstock.runtime.gradients.outside import OutsideGradients
from penstock.runtime.handlers import Batch, Ending, StepContext, TensorPlace
from penstock.runtime.loads import LoadHistory
from penstock.runtime.machinery import Machinery
from penstock.runtime.parts import ModelParts
from penstock.runtime.program import Program
from penstock.runtime.residual_transport import SeparateResidual
from penstock.runtime.segment import PassThrough, Segment, anchor_on
from penstock.runtime.statistics import StatisticsCodec, StepStatistics
from penstock.runtime.transport.legs import Later
from penstock.schedule import StepPlan
from penstock.topology.faults import ACTIVITY


@dataclass(frozen=True)
class Taken:
    """What a step takes from its stack: a second run is of the same step, whatever the stack has by then.

    changes: how often parameters have been updated.
    """

    plan: StepPlan
    program: Program
    machinery: Machinery
    makers: Sequence[RouteMaker | None]
    relocation: Relocation | None
    moe: MoEConfig
    balance: Balance
    codec: StatisticsCodec
    buckets: Buckets
    snapshot: Snapshot
    seed: int
    updates: Updates | None
    changes: int


class Stack(Protocol):
    """The stack whose step it is, as far as a step needs it for as long as it lasts.

    execution, statistics: of the step that ran last, in either of its halves.
    """

    parts: ModelParts
    bounds: Counted | RowBounds
    replica_manager: ReplicaManager
    consistency: Consistency
    gradients: Gradients
    outside: OutsideGradients
    loads: LoadHistory
    replan_request: str
    timed: bool
    execution: Execution | None
    statistics: StepStatistics | None

    @property
    def moe_layers(self) -> list[MoELayer | None]:
        """The layers with experts; None for a dense one."""
        ...

    def taken(self, *, training: bool) -> Taken:
        """Return what a step that begins now takes."""
        ...


class Step:
    """One iteration: its context and its execution.

    before: the first run of the same step, of which this is the second: its rows are counted, whatever bounds
    later steps may have.
    """

    def __init__(
        self,
        stack: Stack,
        batch: Batch,
        training: bool,
        ending: Ending,
        *,
        before: Step | None = None,
    ) -> None:
        self.stack, self.training, self.finished, self.ending = stack, training, False, ending
        taken = stack.taken(training=training) if before is None else before.taken
        self.taken: Taken = taken
        self.shape, self.buckets = taken.plan.shape, taken.buckets
        self.bounds = stack.bounds.of_step(
            self.shape.microbatches, training=training, counted=before is not None
        )
        recomputes = training and (self.shape.recompute != "none" or stack.bounds.repeats_steps)
        self.model_state = ForwardState(
            taken.snapshot, recomputes=recomputes, rewinds=self.must_tell_at_once and before is None
        )
        self.batch = batch
        self.step_replicas = stack.replica_manager.lend(stack.moe_layers)
        self.next_replicas = NextReplicas()
        self.consistency = stack.consistency.of_step(
            batch,
            terms=f"{taken.codec.terms} {type(ending).__name__}",
            seed=taken.seed,
            replan_request=stack.replan_request,
            training=training,
        )
        self.context = self._context()
        lanes, rank = taken.machinery.lanes, taken.machinery.layout.rank
        self.execution = Execution(taken.plan, taken.program, lanes, self.context, rank, timed=stack.timed)

    def _context(self) -> StepContext:
        """Return what handlers of this step work on."""
        stack, taken, machinery = self.stack, self.taken, self.taken.machinery
        tensor = TensorPlace(machinery.layout.tp_rank, machinery.layout.tp_size)
        # On a CPU a cast of a large weight stays in the cache, and costs less than a copy that comes from
        # memory.
        copies = None if device_of(machinery.device).is_cpu else ComputeCopies()
        features = (
            stack.replica_manager,
            self.step_replicas,
            self.next_replicas,
            taken.relocation,
            taken.updates,
        )
        return StepContext(
            parts=stack.parts,
            batch=self.batch,
            part=self.batch.part(tensor.rank, tensor.size) if tensor.size > 1 else self.batch,
            tensor=tensor,
            moe=taken.moe,
            makers=taken.makers,
            balance=taken.balance,
            segment=partial(Segment, anchor_on(machinery.device)) if self.training else PassThrough,
            # Where tasks compute without autocast, `computing` has switched off what the caller has on.
            autocast=nullcontext if machinery.autocast_dtype is None else machinery.autocast,
            wire_dtype=machinery.autocast_dtype,
            residual_transport=(PackedResidual if self.shape.packed_residual else SeparateResidual)(
                machinery.autocast_dtype
            ),
            degrees=self.shape.transfer_degrees,
            weights=partial(WeightGradients, self.buckets.at_once, copies)
            if taken.plan.separate_weights
            else partial(AutogradWeights, copies),
            replications=self.step_replicas.replications,
            split=self.step_replicas.split,
            transports=machinery.transports,
            buckets=self.buckets,
            codec=taken.codec,
            marks=self.consistency.marks,
            ending=self.ending,
            fingerprint=self.consistency.fingerprint,
            bounds=self.bounds,
            training=self.training,
            features={type(each): each for each in features if each is not None},
        )

    def forward(self) -> tuple[Tensor, ...]:
        """Run the forward half and return what the step ends with."""
        ACTIVITY.begin_step()
        # Inside an autograd.Function gradients are off; segments need them for their own graphs.
        with torch.set_grad_enabled(self.training):
            self._run()
        if not self.training:
            self.stack.replica_manager.take_back(self.step_replicas)
        statistics = self.context.total
        assert statistics is not None, "the statistics task has run"
        self._show(statistics)
        assert self.context.marks_total is not None, "the statistics task has run"
        self.consistency.judge(self.context.marks_total)
        if self.training:
            self.model_state.note()
        outputs = self.ending.outputs(self.context, statistics)
        self.loss = outputs[0].detach()
        return outputs

    def _run(self) -> None:
        """Run the next half. In backward, too, experts have expert_slots, for what is recomputed."""
        with self.taken.machinery.computing(), self.step_replicas.applied(), self.bounds.applied():
            self.execution.run()

    def _show(self, statistics: StepStatistics) -> None:
        """Show this step on the stack as the one that ran last, in either of its halves."""
        self.stack.execution, self.stack.statistics = self.execution, statistics

    def backward(self, *grads: Tensor) -> None:
        """Run the backward half from the gradients of what the step has returned."""
        if self.finished:
            raise RuntimeError(
                "backward of this loss has run already: compute a new loss for every backward, and add the "
                "losses of one forward pass before it"
            )
        self.context.slopes = self.ending.slopes(*grads)
        self.stack.consistency.slope = self.context.slopes.alike
        gradients = self.stack.gradients.backward_pass(self.buckets)
        # What can be undone is issued before the host knows whether rows exceeded their bounds.
        undoes = self.taken.updates is None and gradients.can_be_undone
        with self.model_state.restored(), self.stack.outside.apart():
            if not undoes and self.bounds.exceeded():
                self._check(gradients)
                self._repeat(grads)
            else:
                self._backward(gradients, grads)

    def _check(self, gradients: BackwardPass) -> None:
        """Raise RuntimeError where gradients would be wrong."""
        try:
            gradients.check()
            self.model_state.check()
        except RuntimeError as error:  # ranks that have begun ask why this one does not take part
            ACTIVITY.fail("backward", error)
            raise

    def _repeat(self, grads: tuple[Tensor, ...]) -> None:
        """Run both halves again, with as many rows as were wanted; the loss that was returned becomes that of
        the second run."""
        self.finished = True
        self.stack.consistency.read_late()
        again = self.again()
        self.loss.copy_(again.forward()[0])
        again.backward(*grads)

    @property
    def must_tell_at_once(self) -> bool:
        """Whether the outputs may be read when the forward half has run, so that they must be right by
        then."""
        late = self.training and self.stack.bounds.late and not self.ending.tells_at_once
        return self.stack.bounds.repeats_steps and not late

    @property
    def must_repeat(self) -> bool:
        """Whether the forward half has to run again, by `again`, before anything reads the loss.

        Where losses are read late, that is found out in backward.
        """
        return self.must_tell_at_once and self.bounds.exceeded()

    def again(self) -> Step:
        """Return the same step with its rows counted; this one is at its end, and keeps no tensors."""
        self.model_state.rewind()
        self.execution.drop()
        again = Step(self.stack, self.batch, self.training, self.ending, before=self)
        del self.context
        return again

    def _backward(self, gradients: BackwardPass, grads: tuple[Tensor, ...]) -> None:
        if self.taken.updates is not None:
            refuse_left_out(self.buckets, self.taken.updates.groups, self.stack.gradients.name_of)
            self.taken.updates.begin(self.buckets, self.shape, self.taken.changes)
        self._check(gradients)
        try:
            gradients.begin()
            self.finished = True
            self.stack.outside.add()
            self._run()
            self.stack.replica_manager.take_back(self.step_replicas)
            if self.bounds.exceeded():
                gradients.abandon()
                self._repeat(grads)
                return
            if replaced := gradients.finish():
                raise_replaced(self.stack.gradients.name_of(replaced[0]))
        except BaseException as error:
            self._abandon(gradients, error)
            raise
        statistics = self.context.total
        assert statistics is not None, "backward follows this step's forward"
        if self.taken.updates is None:
            # An expert that saw no token has a gradient of zero.
            for parameter in self.stack.gradients.experts():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        else:
            self.taken.updates.end(self.execution.graph, statistics.loss)
        # Gates with a bias learn which choices this step has trained on, the same on all ranks.
        layers = [part.moe for part in self.stack.parts.parts if part.moe is not None]
        for moe, chosen_E in zip(layers, statistics.chosen_YE, strict=True):
            if moe.gate.bias is not None:
                moe.gate.bias.count(chosen_E)
        if self.context.loads_PYE is not None:
            loads, samples = self.context.loads_PYE, self.context.sample_loads
            self.stack.loads.add(loads, samples, self.step_replicas.replications)
        if self.next_replicas.plans is not None:
            self.stack.replica_manager.follow(Later.of(self.next_replicas.plans))
        self._show(statistics)

    def _abandon(self, gradients: BackwardPass, error: BaseException) -> None:
        """Restore gradients after a failed pass; what cannot be restored is noted on the error."""
        doubt, updates = gradients.abandon(), self.taken.updates
        if updates is not None and (self.finished or updates.has_sums):  # `begin` clears buffers with sums
            doubt = updates.failed.note(updates=updates.in_backward and self.finished)
        if doubt:
            error.add_note(doubt)
