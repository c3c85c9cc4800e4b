"""Clipping of gradients as the configuration requires it."""

from __future__ import annotations

import math

from torch import Tensor

from penstock.runtime import PipelinedStack, clip_grad_norm_


def clip_grad_norm(stack: PipelinedStack, max_norm: float | None) -> Tensor:
    """Clip by `penstock.clip_grad_norm_`, not at all for None; return the norm before clipping, float64."""
    return clip_grad_norm_(stack, math.inf if max_norm is None else max_norm)
