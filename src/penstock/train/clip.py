"""The gradient norm of a model whose experts are spread over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.mesh import Group
from penstock.runtime import PipelinedStack

TINY = 1e-6


def clip_grad_norm(stack: PipelinedStack, max_norm: float | None) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before, float64.

    Every expert is counted once, whatever the layout: replicated gradients are equal on all ranks and are
    counted here, expert gradients are summed over the expert group (its replicas hold the same sums again).
    The norm is the same on every rank. Costs one all-reduce of 8 bytes.
    """
    layers = range(len(stack.parts.parts))
    # A parameter that several layers use counts once.
    found = {id(p): p for layer in layers for p in stack.parts.expert_parameters(layer)}
    ids, experts = found.keys(), list(found.values())
    replicated = [p for p in stack.parameters() if id(p) not in ids]
    square = _sum_of_squares(experts)
    stack.machinery.transports.inter.all_reduce(square, Group.EXPERT)
    norm = (square + _sum_of_squares(replicated)).sqrt()
    if max_norm is not None:
        scale = (max_norm / (norm + TINY)).clamp(max=1.0)
        for gradient in _gradients([*experts, *replicated]):
            gradient.mul_(scale.to(gradient.dtype))
    return norm


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _sum_of_squares(parameters: Sequence[nn.Parameter]) -> Tensor:
    gradients = _gradients(parameters)
    if not gradients:
        device = parameters[0].device if parameters else torch.device("cpu")
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(gradients)
    return torch.stack([norm.double() for norm in norms]).square().sum()
