"""AdamW of which every data-parallel rank updates a share: the optimiser that a training loop holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.sharded.share import MASTER, MOMENTS
from penstock.runtime.sharded.updates import Groups, Updates
from penstock.runtime.stack import PipelinedStack

SHARDED = "penstock_sharded"
"""Tag of a parameter whose gradients are never whole on a rank."""


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW on a stack whose steps sum gradients in shares (`optimizer.sharded`, `StepShape.updating`).

    groups: as `torch.optim.AdamW` takes them, each with a `weight_decay`. lr, betas, eps: of all of them.
    max_norm: gradients are scaled so that their norm is at most this; None = as they are. A step whose norm
    is not finite changes nothing. `norm` is that of the last step.

    An ordinary loop works as ever: `loss.backward()`, perhaps several times, `step()`, `zero_grad()`. All
    ranks must call `step`; parameters are the current ones after it. Inside `in_backward` the tasks of the
    schedule update while backward runs, and parameters are gathered in the next forward pass: until then a
    rank has the current values of its share alone, `state_dict` of the stack is refused, and `flush` brings
    the others. Without clipping nothing waits for the norm there, so it is the loss alone that may refuse.

    Raises ValueError for a stack whose steps do not sum in shares, or are made for the other kind of
    clipping.
    """

    def __init__(
        self,
        stack: PipelinedStack,
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
        super().__init__([dict(group) for group in groups], {"lr": lr, "betas": betas, "eps": eps})
        self._stack = stack
        machinery = stack.machinery
        self.updates = Updates(machinery.layout, machinery.transports, self.param_groups, max_norm)
        stack.updates = self.updates
        for parameter in self._trained():
            if not parameter.is_contiguous():
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is not contiguous, so no share of it can "
                    "be updated in place: make it contiguous, or use optimizer.sharded=false"
                )
            setattr(parameter, SHARDED, True)

    @property
    def norm(self) -> Tensor:
        """The norm of all gradients of the last step, before clipping; float64 scalar."""
        assert self.updates.judged is not None, "a step has been taken"
        return self.updates.judged.norm

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Let the backward pass inside update parameters, too: it is the last one before `step`."""
        self.updates.in_backward = True
        try:
            yield
        finally:
            self.updates.in_backward = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update by the sums of the last backward passes, unless they have done so themselves."""
        if closure is not None:
            raise ValueError("a sharded optimizer updates once per backward pass and takes no closure")
        if self.updates.has_sums:
            self.updates.run(self._stack.plan.graph)

    def flush(self) -> None:
        """Bring all parameters up to date that wait for the next forward pass; all ranks must call it."""
        self.updates.flush(self._stack.plan.graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget sums that no update has used."""
        super().zero_grad(set_to_none)
        self.updates.has_sums = False

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters of this rank, whole, as AdamW has it; all ranks must call it."""
        self._stack.settle()
        for name in (*MOMENTS, MASTER):
            for parameter, whole in self.updates.whole(name).items():
                self.state[parameter][name] = whole
        for parameter, step in self.updates.steps.items():
            self.state[parameter]["step"] = step.clone()
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's shares out of whole states, AdamW's own or a sharded one's.

        All ranks must call it. Raises ValueError for the state of another number of parameters.
        """
        self._stack.settle()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, parameter in zip(numbers, self._trained(), strict=True):
            saved, found = state_dict["state"].get(number), self.updates.share_of(parameter)
            if saved is None or found is None:
                continue
            self.updates.steps[parameter].fill_(float(saved["step"]))
            _, share = found
            for name in share.states.keys() & saved.keys():
                for piece, run in share.runs_of(parameter):
                    part = saved[name].reshape(-1)[run.first :][: run.length]
                    share.state(name, piece, run).copy_(part)

    def _trained(self) -> Sequence[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
