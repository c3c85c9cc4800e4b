"""Checks of what a sharded optimiser can work with: numbers, options, parameters and saved states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from penstock.runtime.features.sharded_optimizer.share import MOMENTS

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
