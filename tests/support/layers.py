"""MoE layers of a case that its settings have no words for."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.features.dispatch import DISPATCHES
from penstock.moe import ModuleExperts, MoELayer
from penstock.moe.build import build_layer, build_permutation, build_router, build_shared, dispatch_of
from penstock.moe.experts import ExpertShard
from penstock.placement import ExpertPlacement
from penstock.topology import Layout

if TYPE_CHECKING:
    from tests.support.parity import Case


def module_layer(case: Case, layout: Layout, layer: int) -> MoELayer:
    """The case's layer with experts that nobody knows."""
    config, hidden, ep_size = case.moe, case.model.hidden_size, layout.ep_size
    return MoELayer(
        gate=build_router(hidden, config, layer),
        permutation=build_permutation(config, ep_size, ep_rank=layout.ep_rank, node_size=layout.ep_node_size),
        expert=ModuleExperts(partial(Tanh, hidden), config.num_experts // ep_size),
        dispatch=DISPATCHES[dispatch_of(config)],
        shared=build_shared(hidden, config),
        ep_size=ep_size,
        ep_rank=layout.ep_rank,
        placement=placement_of(config.num_experts, ep_size, layer, scattered=case.scattered),
    )


def scattered_layer(case: Case, layout: Layout, layer: int) -> MoELayer:
    """The case's layer, with experts elsewhere than by default."""
    return build_layer(
        case.model.hidden_size,
        case.moe,
        ep_size=layout.ep_size,
        ep_rank=layout.ep_rank,
        node_size=layout.ep_node_size,
        layer=layer,
        placement=placement_of(case.moe.num_experts, layout.ep_size, layer, scattered=True),
        shard=ExpertShard(layout.etp_rank, layout.etp_size),
    )


def placement_of(num_experts: int, ranks: int, layer: int, *, scattered: bool) -> ExpertPlacement:
    """Where a layer's experts are: in the order of their numbers, or scattered, in every layer otherwise."""
    experts = list(range(num_experts))
    if scattered:
        Random(layer).shuffle(experts)
    slots = num_experts // ranks
    return ExpertPlacement.of([experts[rank * slots : (rank + 1) * slots] for rank in range(ranks)])


class Tanh(nn.Module):
    """An expert of one matrix, with a bias that every process would draw for itself."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.rand(hidden_size))

    def forward(self, rows_RM: Tensor) -> Tensor:
        return torch.tanh(rows_RM @ self.weight.T + self.bias)
