"""AdamW of which every data-parallel rank updates a share: the optimiser that a training loop holds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.runtime.buckets import give_up_stand_ins, has_gradient
from penstock.runtime.clip import mark_sharded
from penstock.runtime.expert_parallel.optimizers import own_parts, watch_optimizer
from penstock.runtime.features.sharded_optimizer.share import MASTER, MOMENTS
from penstock.runtime.features.sharded_optimizer.updates import Groups, ShardedUpdates, Updates
from penstock.runtime.machinery import FeatureStack
from penstock.step import StepShape


class ShardedStack(FeatureStack, Protocol):
    """The stack whose steps sum gradients in shares. `PipelinedStack` is one."""

    model: nn.Module

    def of(self, kind: type[ShardedUpdates]) -> ShardedUpdates:
        """Return the part that its updates have in the stack."""
        ...

    @property
    def base_shape(self) -> StepShape:
        """The uncut shape of a step."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def settle(self) -> None:
        """Take up changes to the model, also in the shares."""
        ...


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW on a stack whose steps sum gradients in shares (`optimizer.zero_stage`, `StepShape.updating`).

    An ordinary loop works as ever: `loss.backward()`, perhaps several times, `step()`, `zero_grad()`. All
    ranks must call `step`; parameters are current after it. Inside `in_backward` the tasks of the schedule
    update while backward runs, and parameters are gathered in the next forward pass, except those with which
    it begins: until then a rank has the current values of its share alone, `state_dict` of the stack is
    refused, and `flush` gathers the others. Without clipping nothing waits for the norm there, so only a loss
    that is not finite makes a step change nothing.

    A step whose norm is not finite changes nothing. `norm` is that of the last step.

    Args:
        groups: As `torch.optim.AdamW` takes them, each with a `weight_decay`, of parameters of the stack.
        lr, betas, eps: For all groups. A stack has one such optimizer: building another takes the stack from
            the first.
        max_norm: Gradients are scaled so that their norm is at most this; None = unscaled.

    Raises:
        ValueError: For a stack whose steps do not sum in shares, or are made for the other kind of clipping,
            and for groups with numbers, options or parameters that cannot be used.
    """

    def __init__(
        self,
        stack: ShardedStack,
        groups: Groups,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_norm: float | None = None,
    ) -> None:
        updating = stack.base_shape.updating
        if updating is None or updating.clips != (max_norm is not None):
            planned = "leave whole gradients" if updating is None else f"have clips = {updating.clips}"
            raise ValueError(
                f"max_norm = {max_norm}, and the stack's steps {planned}: build the stack with "
                f"updating=Updating(clips={max_norm is not None})"
            )
        if max_norm is not None and not max_norm > 0:
            raise ValueError(
                f"max_norm = {max_norm}: it must be more than 0; None leaves gradients as they are"
            )
        self._stack = stack
        super().__init__([dict(group) for group in groups], {"lr": lr, "betas": betas, "eps": eps})
        watch_optimizer(self)
        machinery = stack.machinery
        of_stack = stack.of(ShardedUpdates)
        if of_stack.updates is not None:
            of_stack.updates.flush(stack.plan.graph)
        self.updates = Updates(machinery.layout, machinery.transports, self.param_groups, max_norm)
        of_stack.updates = self.updates
        mark_sharded(self._trained(), self.updates)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Update these parameters, too.

        Raises:
            ValueError: For parameters that cannot be updated in shares.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1], [*self._stack.parameters()])
        except ValueError:
            self.param_groups.pop()
            raise
        if hasattr(self, "updates"):  # not while the groups of the beginning are added
            mark_sharded(param_group["params"], self.updates)

    @property
    def norm(self) -> Tensor:
        """The norm of all gradients of the last step, before clipping; float64 scalar."""
        assert self.updates.judged is not None, "a step has been taken"
        return self.updates.judged.norm

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Let the backward pass inside update parameters, too: it must be the last one before `step`.

        Raises:
            RuntimeError: As `step` does, for gradients that are in no share.
        """
        self._check_current()
        self.updates.in_backward = True
        try:
            yield
        finally:
            self.updates.in_backward = False
        refuse_unowned(self.param_groups, self._stack.model)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update by the sums of the last backward passes, unless they have updated already.

        Raises:
            RuntimeError: Naming the parameter, if one has a gradient that the stack's steps have not summed:
                the update would leave it out.
        """
        if closure is not None:
            raise ValueError("a sharded optimizer updates once per backward pass and takes no closure")
        self._check_current()
        refuse_unowned(self.param_groups, self._stack.model)
        self.updates.run()
        give_up_stand_ins(self._trained())

    def flush(self) -> None:
        """Gather all parameters that wait for the next forward pass; all ranks must call it.

        Raises:
            RuntimeError: As `step` does, for gradients that are in no share.
        """
        refuse_unowned(self.param_groups, self._stack.model)
        self.updates.flush(self._stack.plan.graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard sums that no update has used."""
        give_up_stand_ins(self._trained())
        super().zero_grad(set_to_none)
        self.updates.forget()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters of this rank, whole, as AdamW has it; all ranks must call it.

        Raises:
            RuntimeError: As `flush` does, if a pass that failed has updated only a part of them.
        """
        self.updates.failed.refuse_parameters()
        self._stack.settle()
        for name in (*MOMENTS, MASTER):
            for parameter, whole in self.updates.whole(name).items():
                self.state[parameter][name] = whole
        for parameter, step in self.updates.steps.items():
            self.state[parameter]["step"] = step.clone()
        self.state.update({parameter: dict(saved) for parameter, saved in self.updates.waiting.items()})
        for gone in self.state.keys() - set(self._trained()):  # it has left the groups
            del self.state[gone]
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's shares out of whole states, AdamW's own or a sharded one's.

        A parameter without a saved state starts afresh. All ranks must call it.

        Raises:
            ValueError: For the state of other parameters or of another kind of optimizer.
            ShareError: For that of another rank or layout.
        """
        state_dict = own_parts(self, state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        pairs = [(p, state_dict["state"].get(n)) for n, p in zip(numbers, self._trained(), strict=False)]
        check_state(state_dict["param_groups"], pairs)
        self._stack.settle()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.updates.groups = self.param_groups  # super() has made a new list
        self.updates.waiting.clear()
        for parameter, saved in pairs:
            found = self.updates.share_of(parameter)
            if found is None and saved:  # frozen; it may be trained later
                self.updates.waiting[parameter] = copy.deepcopy(dict(saved))
            if found is not None:
                zeros = torch.zeros_like(parameter)
                fresh = {"step": 0, **dict.fromkeys(MOMENTS, zeros)}
                share = found[1]
                known: Mapping[str, Any] = saved or fresh
                self.updates.steps[parameter].fill_(float(known["step"]))
                for name in share.states.keys() & known.keys():
                    for piece, run in share.runs_of(parameter):
                        part = known[name].reshape(-1)[run.first :][: run.length]
                        share.state(name, piece, run).copy_(part)

    def _check_current(self) -> None:
        """Raise RuntimeError if the stack sums for another optimizer."""
        if self._stack.of(ShardedUpdates).updates is not self.updates:
            raise RuntimeError(
                "another ShardedAdamW was built on this stack since, and the stack's steps sum gradients for "
                "that one alone: build one with all parameter groups"
            )

    def _trained(self) -> Sequence[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


# ---- refusals of what a sharded optimiser would leave out, or cannot work with ----------------------------


def refuse_unowned(groups: Groups, model: nn.Module) -> None:
    """Raise RuntimeError if a parameter of these groups has a gradient.

    The stack's steps leave none: it comes from a term that was added to the loss, or from another backward
    pass.
    """
    for group in groups:
        for parameter in group["params"]:
            if has_gradient(parameter):
                names = (name for name, other in model.named_parameters() if other is parameter)
                name = next(names, f"a parameter of shape {list(parameter.shape)}")
                raise RuntimeError(
                    f"{name} has a gradient that no step of the stack has summed (of a "
                    "term added to the stack's loss, or of another backward pass), and a sharded optimizer "
                    "updates from the sums alone: compute the term in the loss of the stack, or use "
                    "optimizer.zero_stage=0. optimizer.zero_grad() discards the gradient"
                )


# ---- checks of what a sharded optimiser can work with: numbers, options, parameters and saved states ------


SETTINGS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (lambda lr: 0 <= float(lr) < math.inf, "at least 0"),
    "betas": (lambda betas: all(0 <= beta < 1 for beta in betas), "at least 0 and less than 1"),
    "eps": (lambda eps: 0 <= eps < math.inf, "at least 0"),
    "weight_decay": (lambda decay: 0 <= decay < math.inf, "at least 0"),
}
OPTIONS = ("amsgrad", "maximize", "differentiable")
"""Options of `torch.optim.AdamW` that an update of a share would ignore."""


def check_group(group: Mapping[str, Any], trained: Sequence[nn.Parameter]) -> None:
    """Raise ValueError unless shares of this group of a stack with these parameters can be updated."""
    _check_settings(group)
    known = set(map(id, trained))
    for parameter in group["params"]:
        shape = list(parameter.shape)
        if id(parameter) not in known:
            raise ValueError(
                f"a parameter of shape {shape} is none of the stack's, so its gradient is not summed in "
                "shares: update it with an optimizer of its own"
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"a parameter of shape {shape} is not contiguous, so no share of it can be updated in place: "
                "make it contiguous, or use optimizer.zero_stage=0"
            )


def check_state(
    groups: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[nn.Parameter, Mapping[str, Any] | None]]
) -> None:
    """Raise ValueError unless saved groups are AdamW's and every state fits the parameter beside it."""
    for group in groups:
        _check_settings(group)
    for parameter, saved in ((p, state) for p, state in pairs if state):
        for name in MOMENTS:
            found = None if name not in saved else list(saved[name].shape)
            if found != list(parameter.shape):
                raise ValueError(
                    f"the saved {name} of a parameter of shape {list(parameter.shape)} is of shape {found}: "
                    "the state is of another model, layout or order of parameters"
                )


def _check_settings(group: Mapping[str, Any]) -> None:
    for name, (fits, needed) in SETTINGS.items():
        if name not in group:
            raise ValueError(f"a parameter group of a sharded optimizer has no {name}: AdamW needs it")
        if not fits(group[name]):
            raise ValueError(f"{name} = {group[name]} of a parameter group: it must be {needed}")
    check_options(group)


def check_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of a group that a sharded optimiser would ignore."""
    ignored = [option for option in OPTIONS if group.get(option)]
    if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
        ignored.append("decoupled_weight_decay")
    for option in ignored:
        raise ValueError(
            f"{option} = {group[option]} of a parameter group: a sharded optimizer does not have it; "
            "leave it out, or use optimizer.zero_stage=0"
        )
