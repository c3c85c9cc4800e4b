"""One iteration of a stack: what its handlers work on, and its two halves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.device import device_of
from penstock.moe import MoEConfig
from penstock.moe.products import AutogradWeights, ComputeCopies, WeightGradients
from penstock.moe.routers import Balance
from penstock.routing.routes import RouteMaker
from penstock.runtime.batch import Batch
from penstock.runtime.bounds import RowBounds
from penstock.runtime.buckets import BackwardPass, Buckets
from penstock.runtime.consistency import Consistency, StepConsistency, Turns
from penstock.runtime.executor import Execution, Program, Times
from penstock.runtime.fingerprints import Snapshot
from penstock.runtime.gradients import Gradients, OutsideGradients
from penstock.runtime.handlers import (
    Counted,
    Ending,
    PassThrough,
    ResidualTransport,
    Segment,
    StepContext,
    TensorPlace,
    anchor_on,
)
from penstock.runtime.machinery import Machinery, StepFeature, without_collections
from penstock.runtime.parts import ModelParts, refuse_data_parallel
from penstock.runtime.statistics import LoadHistory, StatisticsCodec, StepStatistics
from penstock.schedule import StepPlan
from penstock.topology.faults import ACTIVITY


@dataclass(frozen=True)
class Taken:
    """What a step takes from its stack: a second run is of the same step, whatever the stack has by then."""

    plan: StepPlan
    program: Program
    machinery: Machinery
    makers: Sequence[RouteMaker | None]
    moe: MoEConfig
    balance: Balance
    codec: StatisticsCodec
    buckets: Buckets
    snapshot: Snapshot
    seed: int
    features: Sequence[StepFeature]


class Stack(Protocol):
    """The stack whose step it is, as far as a step needs it for as long as it lasts.

    Attributes:
        times, statistics: Those of the step that ran last, in either of its halves.
    """

    parts: ModelParts
    bounds: Counted | RowBounds
    consistency: Consistency
    gradients: Gradients
    outside: OutsideGradients
    turns: Turns
    loads: LoadHistory
    replan_request: str
    timed: bool
    times: Times | None
    statistics: StepStatistics | None

    def taken(self, *, training: bool) -> Taken:
        """Return what a step that begins now takes."""
        ...


class Step:
    """One iteration: its context and its execution.

    Args:
        before: The first run of the same step, if this is the second, whose rows are counted, whatever bounds
            later steps may have; None: this is the first.
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
        recomputes = training and (taken.program.recomputes or stack.bounds.repeats_steps)
        self.model_state = ForwardState(
            taken.snapshot, recomputes=recomputes, rewinds=self.must_tell_at_once and before is None
        )
        self.batch = batch
        self.consistency = StepConsistency(
            stack.consistency,
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
        context = StepContext(
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
            residual_transport=ResidualTransport(machinery.autocast_dtype),
            degrees=self.shape.transfer_degrees,
            weights=partial(WeightGradients, self.buckets.at_once, copies)
            if taken.plan.separate_weights
            else partial(AutogradWeights, copies),
            transports=machinery.transports,
            buckets=self.buckets,
            codec=taken.codec,
            marks=self.consistency.marks,
            ending=self.ending,
            fingerprint=self.consistency.fingerprint,
            bounds=self.bounds,
            training=self.training,
        )
        for feature in taken.features:
            feature.prepare(context)
        return context

    def forward(self) -> tuple[Tensor, ...]:
        """Run the forward half and return what the step ends with."""
        ACTIVITY.begin_step()
        # Inside an autograd.Function gradients are off; segments need them for their own graphs.
        with torch.set_grad_enabled(self.training):
            self._run()
        if not self.training:
            for feature in self.taken.features:
                feature.over()
        statistics = self.context.total
        self.stack.times, self.stack.statistics = self.execution.times, statistics
        self.consistency.judge(self.context.marks_total)
        if self.training:
            self.model_state.note()
        outputs = self.ending.outputs(self.context, statistics)
        self.loss = outputs[0].detach()
        if not self.training and not self.must_repeat:
            self._drop()
        return outputs

    def _run(self) -> None:
        """Run the next half. In backward, too, experts have expert_slots, for what is recomputed."""
        with without_collections(), computing(self.taken.machinery), ExitStack() as inside:
            for feature in self.taken.features:
                inside.enter_context(feature.applied())
            inside.enter_context(self.bounds.applied())
            self.execution.run()

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
        undoes = gradients.can_be_undone and all(feature.can_be_undone for feature in self.taken.features)
        with self.model_state.restored(), self.stack.outside.apart():
            if not undoes and self.bounds.exceeded():
                self._check(gradients)
                self._repeat(grads)
                return
            for feature in self.taken.features:
                feature.begin_backward(self.buckets, self.stack.gradients.name_of)
            self._check(gradients)
            try:
                gradients.begin()
                self.finished = True
                # What was caught may belong to a loss whose step waits.
                if self.ending.averaged is not None or not self.stack.turns.waits:
                    self.stack.outside.add(self.ending.averaged)
                self._run()
                for feature in self.taken.features:
                    feature.over()
                if self.bounds.exceeded():
                    gradients.abandon()
                    self._repeat(grads)
                    return
                if replaced := gradients.finish():
                    raise RuntimeError(REPLACED.format(self.stack.gradients.name_of(replaced[0])))
            except BaseException as error:
                if self.finished and (written := self.model_state.written) is not None:
                    error.add_note(REPLACED.format(written))  # autograd, which refuses it, names no parameter
                # Earlier gradients are restored; what cannot be restored is noted on the error.
                doubts = [gradients.abandon()]
                doubts += [feature.failed(begun=self.finished) for feature in self.taken.features]
                if noted := [doubt for doubt in doubts if doubt]:
                    error.add_note(noted[-1])
                if self.finished:  # the caller may keep the loss while the next step runs
                    self._drop()
                raise
            self._end()

    def _end(self) -> None:
        """End a backward pass that has succeeded: what is learnt from it is for steps to come."""
        if not self.stack.gradients.in_shares:
            # An expert that saw no token has a gradient of zero.
            for parameter in self.stack.gradients.experts():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        # Gates with a bias learn which choices this step has trained on, the same on all ranks.
        layers = [part.moe for part in self.stack.parts.parts if part.moe is not None]
        for moe, chosen_E in zip(layers, self.context.total.chosen_YE, strict=True):
            if moe.gate.bias is not None:
                moe.gate.bias.count(chosen_E)
        if self.context.loads_PYE is not None:
            loads, samples = self.context.loads_PYE, self.context.sample_loads
            self.stack.loads.add(loads, samples, self.context.replications)
        for feature in self.taken.features:
            feature.end(self.context, self.taken.plan.graph)
        self.stack.times, self.stack.statistics = self.execution.times, self.context.total
        self._drop()

    def _drop(self) -> None:
        """Let go of all tensors: the caller may keep what the step has returned for much longer."""
        self.execution.drop()
        for name in ("context", "loss"):
            vars(self).pop(name, None)

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
        loss, second = self.loss, self.again()
        loss.copy_(second.forward()[0])
        second.backward(*grads)

    @property
    def must_tell_at_once(self) -> bool:
        """Whether the outputs must be right when the forward half has run, since they may be read then."""
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
        self._drop()
        return Step(self.stack, self.batch, self.training, self.ending, before=self)


def computing(machinery: Machinery) -> AbstractContextManager[Any]:
    """Return a context for half a step.

    The caller's autocast is off, so backward tasks compute as forward ones did. Where tasks compute under
    autocast, their casts of parameters last for the half: autocast forgets them when its outermost context is
    left, and with one context per task every microbatch would cast every parameter, and keep the cast for
    backward.
    """
    device = machinery.device.type
    if machinery.autocast_dtype is None and not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


# ---- refusals of what would go wrong around a step, with what to do instead -------------------------------
#
# Messages say "a scheduled model": who has called `penstock.parallelize` has never seen the stack inside.


def check_no_data_parallel(model: nn.Module) -> None:
    """Raise TypeError if DistributedDataParallel, around a module that holds the stack, manages its model."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        managed = {id(parameter) for parameter in ddp._module_parameters}
        if any(id(parameter) in managed for parameter in model.parameters()):
            refuse_data_parallel()


REPLACED = (
    "the gradient of {} was replaced or removed while backward was running, or the parameter was updated, "
    "before its gradient was summed over ranks and microbatches: the update is wrong. Update parameters "
    "after loss.backward(), not in a hook (register_post_accumulate_grad_hook)."
)


def check_no_checkpoint() -> None:
    """Raise RuntimeError if activation checkpointing is around the whole stack.

    It would run the forward tasks again in the middle of the backward ones, on the same lanes.
    """
    recomputes = torch._C._current_graph_task_id() != -1
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if recomputes or (hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"):
        raise RuntimeError(
            "torch.utils.checkpoint around a whole scheduled model would run its transfers again in the "
            "middle of backward. Put it around modules inside the layers, such as their attention."
        )


def check_no_transform() -> None:
    """Raise RuntimeError inside a transform of torch.func (grad, vmap, jvp), which would not see a step."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "a transform of torch.func (grad, vmap, jvp) around a scheduled model: it cannot follow tasks on "
            "other threads and ranks. Call the model outside of transforms, and loss.backward() for its "
            "gradients; torch.func.functional_call by itself may be used"
        )


def check_no_second_derivative() -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated again (create_graph=True).

    Autograd enables gradients in such a pass alone.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "backward(create_graph=True) of a scheduled model's loss: a step sums finished gradients over "
            "ranks, which have no graph, so they cannot be differentiated again. Call backward() without "
            "create_graph, and take second derivatives of the model outside of its steps"
        )


# ---- what a backward pass must find as its forward pass left it: values, and what decides what is
# recomputed
#
# What only decides how modules compute is put back while backward runs, so that gradients are those of the
# forward pass. Values cannot be put back, so a change of them is refused before anything is sent.


SAMPLED: Final = 16
"""About as many elements of every parameter are compared."""
Kind = tuple[torch.device, torch.dtype]


class ForwardState:
    """The state of a model in one forward pass: made before it, told its end by `note`.

    A parameter's version says whether it was written to, but not by `parameter.data`. So a few of its
    elements are compared, too: that finds whatever changes most of them, such as weights that are swapped.

    Args:
        recomputes: Whether tasks run a second time in the backward pass. They then also need the same
            modules, in the same mode, and the same buffers.
        rewinds: Whether the forward pass itself may be run a second time at its end, after `rewind`.
    """

    def __init__(self, snapshot: Snapshot, *, recomputes: bool, rewinds: bool = False) -> None:
        self._snapshot, self._recomputes = snapshot, recomputes
        buffers = snapshot.buffers() if recomputes or rewinds else []
        self._buffers = [(b, 0 if b.is_inference() else b._version) for b in buffers]
        self._before = [buffer.clone() for buffer in buffers] if rewinds else []

    @torch.no_grad()
    def rewind(self) -> None:
        """Put buffers to which the pass has added, as running averages do, back to what they were before."""
        for (buffer, version), before in zip(self._buffers, self._before, strict=False):
            if not buffer.is_inference() and buffer._version != version:
                buffer.copy_(before)
        self._before = []

    def note(self) -> None:
        """Note the state at the end of the forward pass."""
        parameters = self._snapshot.parameters
        self._trained = [p.requires_grad for p in parameters]
        self._versions = [p._version for p in parameters]
        self._samples = Samples(parameters)
        self._counting = [buffer for buffer, version in self._buffers if buffer._version != version]
        if self._recomputes:
            self._places = [p.data_ptr() for p in parameters]
            self._modes = [module.training for module in self._snapshot.modules]
            self._dtype = torch.get_default_dtype()

    @property
    def written(self) -> str | None:
        """The name of a parameter that was written to since the end of the pass; None if there is none."""
        pairs = zip(self._snapshot.parameters, self._versions, strict=True)
        return next((self._snapshot.name_of(p) for p, version in pairs if p._version != version), None)

    def check(self) -> None:
        """Raise RuntimeError if values of parameters, or modules that run again, are not what they were.

        On a GPU a change through `parameter.data` raises when the device gets there, and names no parameter.
        """
        if self._recomputes and not self._snapshot.has_same_modules():
            raise RuntimeError(_refusal("modules or parameters of the model were replaced"))
        for place, parameter in enumerate(self._snapshot.parameters):
            written = parameter._version != self._versions[place]
            if written or (self._recomputes and parameter.data_ptr() != self._places[place]):
                raise RuntimeError(_refusal(f"{self._snapshot.name_of(parameter)} was changed"))
        if (changed := self._samples.changed()) is not None:
            raise RuntimeError(_refusal(f"{self._snapshot.name_of(changed)} was changed"))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the model be as in the forward pass, while its backward runs.

        A parameter that was frozen then gets no gradient. Buffers to which the forward pass has added, as
        running averages do, are not added to a second time.
        """
        with ExitStack() as after:
            for parameter, trained in zip(self._snapshot.parameters, self._trained, strict=True):
                if parameter.requires_grad and not trained:
                    parameter.requires_grad_(False)
                    after.callback(parameter.requires_grad_)
            if self._recomputes:
                for module, training in zip(self._snapshot.modules, self._modes, strict=True):
                    if module.training != training:
                        after.callback(setattr, module, "training", module.training)
                        module.training = training
                if torch.get_default_dtype() != self._dtype:
                    after.callback(torch.set_default_dtype, torch.get_default_dtype())
                    torch.set_default_dtype(self._dtype)
                for buffer in self._counting:
                    after.callback(_put_back, buffer, buffer.clone())
            yield


class Samples:
    """A few elements of every parameter, as they are now."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._views: dict[Kind, list[tuple[nn.Parameter, Tensor]]] = {}
        with torch.no_grad():
            for parameter in parameters:
                if type(parameter) is nn.Parameter and parameter.numel():
                    of_kind = self._views.setdefault((parameter.device, parameter.dtype), [])
                    if parameter.is_contiguous():
                        step = parameter.numel() // SAMPLED | 1  # odd, so that not all are of one column
                        some = parameter.as_strided((-(-parameter.numel() // step),), (step,))
                    else:  # of a tensor whose memory has gaps, more than `SAMPLED` elements
                        some = parameter[tuple(slice(None, None, max(1, n // 4)) for n in parameter.shape)]
                    of_kind.append((parameter, some))
        self._values = self._read()

    def changed(self) -> nn.Parameter | None:
        """Return a parameter whose elements are others now; None if there is none, or it is on a GPU."""
        for (kind, before), now in zip(self._values.items(), self._read().values(), strict=True):
            if device_of(kind[0]).is_gpu:  # reading the answer would make the host wait
                torch._assert_async((before == now).all(), _refusal("a parameter was changed"))
            elif not torch.equal(before, now):
                sizes = [view.numel() * view.itemsize for _, view in self._views[kind]]
                pairs = zip(self._views[kind], before.split(sizes), now.split(sizes), strict=True)
                return next(p for (p, _), was, present in pairs if not torch.equal(was, present))
        return None

    def _read(self) -> dict[Kind, Tensor]:
        """Return the elements as bytes, so that a NaN is equal to itself."""
        rows = {kind: [v if v.dim() == 1 else v.flatten() for _, v in of] for kind, of in self._views.items()}
        return {kind: torch.cat(views).view(torch.uint8) for kind, views in rows.items()}


@torch.no_grad()
def _put_back(buffer: Tensor, values: Tensor) -> None:
    buffer.copy_(values)


def _refusal(what: str) -> str:
    return (
        f"{what} between forward and backward, so gradients would be those of neither: change a model before "
        "the forward pass or after backward, or compute the loss again"
    )
