"""Layers with the parts that docs/extending.md shows, as formulas: token by token, choice by choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import MoELayer
from tests.support.pages import CHOICES, EXPERTS, HIDDEN

SLOTS = 3


def mixed(
    x_TM: Tensor,
    scores_TE: Tensor,
    expert: Callable[[int, Tensor], Tensor],
    slots: float = float("inf"),
    surest_first: bool = False,
) -> Tensor:
    """Token by token, choice by choice: the two best experts, weights that sum to one."""
    values, indices = scores_TE.topk(CHOICES)
    values = values / values.sum(-1, keepdim=True)
    queue: Sequence[int] = range(len(x_TM))
    if surest_first:
        queue = sorted(queue, key=lambda t: -float(values[t].detach().max()))
    taken, out = [0] * EXPERTS, [torch.zeros_like(x) for x in x_TM]
    for choice in range(CHOICES):
        for t in queue:
            e = int(indices[t, choice])
            taken[e] += 1
            if taken[e] <= slots:
                out[t] = out[t] + values[t, choice] * expert(e, x_TM[t])
    return torch.stack(out)


def softmax(layer: MoELayer, x_TM: Tensor) -> Tensor:
    return (x_TM @ layer.gate.get_parameter("weight").T).softmax(-1)


def swiglu(layer: MoELayer, e: int, x_M: Tensor) -> Tensor:
    gate, up, down = (layer.experts.get_parameter(name)[e] for name in ("w_gate", "w_up", "w_down"))
    return (F.silu(x_M @ gate) * (x_M @ up)) @ down


def distances(layer: MoELayer, x_TM: Tensor) -> Tensor:
    points = layer.gate.get_parameter("points")
    logits = [[-(x - point).square().sum().sqrt() for point in points] for x in x_TM]
    return mixed(x_TM, torch.stack([torch.stack(row) for row in logits]).softmax(-1), partial(swiglu, layer))


def squared_relu(layer: MoELayer, x_TM: Tensor) -> Tensor:
    up, down = layer.experts.get_parameter("w_up"), layer.experts.get_parameter("w_down")
    return mixed(x_TM, softmax(layer, x_TM), lambda e, x_M: (x_M @ up[e]).clamp(min=0) ** 2 @ down[e])


def modules(layer: MoELayer, x_TM: Tensor) -> Tensor:
    def expert(e: int, x_M: Tensor) -> Tensor:
        name = f"expert_modules.{e}"
        norm = F.layer_norm(
            x_M,
            (HIDDEN,),
            layer.experts.get_parameter(f"{name}.0.weight"),
            layer.experts.get_parameter(f"{name}.0.bias"),
        )
        narrow = F.silu(norm @ layer.experts.get_parameter(f"{name}.1.weight").T)
        return narrow @ layer.experts.get_parameter(f"{name}.3.weight").T

    return mixed(x_TM, softmax(layer, x_TM), expert)


def clipped(layer: MoELayer, x_TM: Tensor) -> Tensor:
    def expert(e: int, x_M: Tensor) -> Tensor:
        out_M = swiglu(layer, e, x_M)
        out_M.register_hook(lambda grad_M: grad_M * min(1.0, 0.01 / float(grad_M.norm())))
        return out_M

    return mixed(x_TM, softmax(layer, x_TM), expert)


def surest_first(layer: MoELayer, x_TM: Tensor) -> Tensor:
    return mixed(x_TM, softmax(layer, x_TM), partial(swiglu, layer), slots=SLOTS, surest_first=True)


def usual(layer: MoELayer, x_TM: Tensor) -> Tensor:
    return mixed(x_TM, softmax(layer, x_TM), partial(swiglu, layer))


FORMULAS: dict[str, Callable[[MoELayer, Tensor], Tensor]] = {
    "gate": distances,
    "experts": squared_relu,
    "module": modules,
    "hook": clipped,
    "permutation": surest_first,
    "dispatch": usual,
}
