"""Refusals of what a sharded optimiser would leave out, or cannot work with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from penstock.runtime.features.sharded_optimizer.share import MOMENTS
from penstock.runtime.gradients.buckets import Buckets, has_gradient

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups as in `torch.optim`."""
NameOf = Callable[[nn.Parameter], str]


def group_numbers(groups: Groups) -> dict[int, int]:
    """Return the number of every parameter's group, by the parameter's id."""
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}


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


def refuse_left_out(buckets: Buckets, groups: Groups, name_of: NameOf) -> None:
    """Raise RuntimeError if a step would sum gradients of a parameter that is in no group."""
    known = group_numbers(groups)
    for bucket in buckets.all:
        for parameter in (p for flat in bucket.flats for p in flat.parameters):
            if id(parameter) not in known:
                raise RuntimeError(
                    f"{name_of(parameter)} is trained and in no group of the ShardedAdamW, and no other "
                    "optimizer can update it, since its gradient is summed in shares: give it to "
                    "optimizer.add_param_group, freeze it (requires_grad_(False)) before the forward pass, "
                    "or use optimizer.zero_stage=0"
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


def check_norm(max_norm: float | None) -> None:
    """Raise ValueError unless gradients can be scaled to this norm."""
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm = {max_norm}: it must be more than 0; None leaves gradients as they are")


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
    for option in OPTIONS:
        if group.get(option):
            raise ValueError(
                f"{option} = {group[option]} of a parameter group: a sharded optimizer does not have it; "
                "leave it out, or use optimizer.zero_stage=0"
            )
