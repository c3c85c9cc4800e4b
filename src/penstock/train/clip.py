"""Clipping as the configuration says it."""

from __future__ import annotations

import math

from torch import Tensor

from penstock.runtime import PipelinedStack, clip_grad_norm_


def clip_grad_norm(stack: PipelinedStack, max_norm: float | None) -> Tensor:
    """`penstock.clip_grad_norm_`; None leaves gradients as they are. Returns the norm before, float64."""
    return clip_grad_norm_(stack, math.inf if max_norm is None else max_norm)
