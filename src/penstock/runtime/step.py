"""One iteration of a stack: what its handlers work on, and its two halves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.device import device_of
from penstock.moe.experts.weight_gradients import AutogradWeights, ComputeCopies, WeightGradients
from penstock.runtime.carriage import Apart, InRows
from penstock.runtime.checks.forward_state import ForwardState
from penstock.runtime.checks.misuse import raise_replaced
from penstock.runtime.executor import Execution
from penstock.runtime.gradients.in_place import BackwardPass
from penstock.runtime.handlers import Batch, StepContext, TensorPlace
from penstock.runtime.segment import PassThrough, Segment, anchor_on
from penstock.runtime.sharded.strays import refuse_left_out
from penstock.runtime.statistics import StepStatistics
from penstock.runtime.transport.legs import Later
from penstock.topology.rollcall import ACTIVITY

if TYPE_CHECKING:
    from penstock.runtime.stack import PipelinedStack


class Step:
    """One iteration: its context and its execution.

    counted: its rows are counted, whatever bounds later steps may have.
    """

    def __init__(self, stack: PipelinedStack, batch: Batch, training: bool, *, counted: bool = False) -> None:
        self.stack, self.training, self.finished = stack, training, False
        machinery, self.shape = stack.machinery, stack.plan.shape
        self.buckets = stack.buckets
        self.bounds = stack.bounds.of_step(self.shape.microbatches, counted=counted)
        runs_again = training and (self.shape.recompute != "none" or stack.bounds.repeats_steps)
        self.model_state = ForwardState(stack.gradients.snapshot, runs_again=runs_again)
        at_once = self.buckets.at_once
        # On a CPU a cast of a large weight stays in the cache, and costs less than a copy that comes from
        # memory.
        copies = None if device_of(machinery.device).is_cpu else ComputeCopies()
        layout = machinery.layout
        self.batch = batch
        self.lodging = stack.host.lend(stack.moe_layers)
        tensor = TensorPlace(layout.mp_rank, layout.mp_size)
        self.consistency = stack.consistency.of_step(
            batch, terms=stack.codec.terms, seed=stack.seed, wish=stack.wish, training=training
        )
        self.context = StepContext(
            parts=stack.parts,
            batch=batch,
            part=batch.part(tensor.rank, tensor.size) if tensor.size > 1 else batch,
            tensor=tensor,
            moe=stack.moe,
            makers=stack.makers,
            balance=stack.balance,
            segment=partial(Segment, anchor_on(machinery.device)) if training else PassThrough,
            # Where tasks compute without autocast, `computing` has switched off what the caller has on.
            autocast=nullcontext if machinery.autocast_dtype is None else machinery.autocast,
            wire_dtype=machinery.autocast_dtype,
            carriage=(InRows if self.shape.residual_in_rows else Apart)(machinery.autocast_dtype),
            degrees=self.shape.transfer_degrees,
            weights=partial(WeightGradients, at_once, copies)
            if stack.plan.weights_apart
            else partial(AutogradWeights, copies),
            host=stack.host,
            lodging=self.lodging,
            transports=machinery.transports,
            buckets=self.buckets,
            codec=stack.codec,
            marks=self.consistency.marks,
            fingerprint=self.consistency.fingerprint,
            bounds=self.bounds,
            relocation=stack.relocation,
            training=training,
            updates=stack.updates,
        )
        self.changes = 0 if stack.updates is None else stack.updates.changes
        program = stack.program(training=training)
        self.execution = Execution(
            stack.plan, program, machinery.lanes, self.context, machinery.layout.rank, timed=stack.timed
        )

    def forward(self) -> Tensor:
        """Run the forward half and return the loss of the whole batch of all ranks."""
        ACTIVITY.begin_step()
        # Inside an autograd.Function gradients are off; segments need them for their own graphs.
        with torch.set_grad_enabled(self.training):
            self._run()
        if not self.training:
            self.stack.host.take_back(self.lodging)
        statistics = self.context.total
        assert statistics is not None, "the statistics task has run"
        self._show(statistics)
        assert self.context.marks_total is not None, "the statistics task has run"
        self.consistency.judge(self.context.marks_total)
        if self.training:
            self.model_state.note()
        # A copy, or loss and step would refer to each other: a cycle that keeps all tensors.
        loss = statistics.loss.clone()
        self.loss = loss.detach()
        return loss

    def _run(self) -> None:
        """Run the next half. In backward, too, experts have seats, for what is recomputed."""
        with self.stack.machinery.computing(), self.lodging.seated(), self.bounds.applied():
            self.execution.run()

    def _show(self, statistics: StepStatistics) -> None:
        """Show this step on the stack as the one that ran last, in either of its halves."""
        self.stack.execution, self.stack.statistics = self.execution, statistics

    def backward(self, loss_gradient: Tensor) -> None:
        if self.finished:
            raise RuntimeError("backward of this loss has run already: compute a new loss for every backward")
        self.context.loss_gradient = self.stack.consistency.slope = loss_gradient
        gradients = self.stack.gradients.backward_pass(self.buckets)
        # What can be undone is issued before the host knows whether rows exceeded their bounds.
        undoes = self.context.updates is None and gradients.can_be_undone
        with self.model_state.restored():
            if not undoes and self.bounds.exceeded():
                self._repeat()
            else:
                self._backward(gradients)

    def _repeat(self) -> None:
        """Run both halves again, with as many rows as were wanted; the loss that was returned becomes that of
        the second run."""
        self.stack.consistency.read_late()
        again = self.again()
        self.loss.copy_(again.forward())
        again.backward(self.context.loss_gradient)
        self.finished = True

    @property
    def must_run_again(self) -> bool:
        """Whether the forward half has to run again, by `again`, before anything reads the loss.

        Where losses are read late, that is found out in backward.
        """
        late = self.training and self.stack.bounds.late
        return not late and self.bounds.exceeded()

    def again(self) -> Step:
        """Return the same step with its rows counted; this one is at its end."""
        self.execution.drop()
        again = Step(self.stack, self.batch, self.training, counted=True)
        again.context.codec, again.context.moe = self.context.codec, self.context.moe
        again.context.balance = self.context.balance
        return again

    def _backward(self, gradients: BackwardPass) -> None:
        if self.context.updates is not None:
            refuse_left_out(self.buckets, self.context.updates.groups, self.stack.gradients.name_of)
            self.context.updates.begin(self.buckets, self.shape, self.changes)
        try:
            gradients.check()
            self.model_state.check()
        except RuntimeError as error:  # ranks that have begun ask why this one does not take part
            ACTIVITY.fail("backward", error)
            raise
        try:
            gradients.begin()
            self.finished = True
            self._run()
            self.stack.host.take_back(self.lodging)
            if self.bounds.exceeded():
                gradients.abandon()
                self._repeat()
                return
            if replaced := gradients.finish():
                raise_replaced(self.stack.gradients.name_of(replaced[0]))
        except BaseException as error:
            self._abandon(gradients, error)
            raise
        statistics = self.context.total
        assert statistics is not None, "backward follows this step's forward"
        if self.context.updates is None:
            _fill_missing(self.stack.gradients.experts())
        else:
            self.context.updates.end(self.execution.graph, statistics.loss)
        self._count_choices(statistics)
        if self.context.loads_PYE is not None:
            loads, samples = self.context.loads_PYE, self.context.sample_loads
            self.stack.loads.add(loads, samples, self.lodging.hostings)
        if self.context.plans is not None:
            self.stack.host.follow(Later.of(self.context.plans))
        self._show(statistics)

    def _abandon(self, gradients: BackwardPass, error: BaseException) -> None:
        """Restore gradients after a failed pass; what cannot be restored is noted on the error."""
        doubt, updates = gradients.abandon(), self.context.updates
        if updates is not None and (self.finished or updates.has_sums):  # `begin` clears buffers with sums
            doubt = updates.failed.note(updates=updates.in_backward and self.finished)
        if doubt:
            error.add_note(doubt)

    def _count_choices(self, statistics: StepStatistics) -> None:
        """Tell gates with a bias which choices this step has trained on; the same on all ranks."""
        layers = [part.moe for part in self.stack.parts.parts if part.moe is not None]
        for moe, chosen_E in zip(layers, statistics.chosen_YE, strict=True):
            if moe.gate.bias is not None:
                moe.gate.bias.count(chosen_E)


def _fill_missing(parameters: Sequence[nn.Parameter]) -> None:
    """Give a zero gradient to every expert that saw no token."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
