"""Versions of parameters that rise with every update, so that autograd and a step notice one in between."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


@cache
def count_updates() -> None:
    """Let every optimiser in this process raise the versions of its parameters when it steps, from now on.

    Autograd refuses a backward pass if a tensor that it saved has another version than it had. The fused
    kernels of torch (AdamW, SGD, Adagrad), and those of several other packages, leave the version as it is:
    an update between forward and backward would give gradients of neither, without an error. Optimisers that
    raise versions themselves raise them twice. It costs about 0.2 us per parameter and update.
    """

    def raise_versions(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        torch.autograd.graph.increment_version(p for p in parameters if not p.is_inference())

    register_optimizer_step_post_hook(raise_versions)
