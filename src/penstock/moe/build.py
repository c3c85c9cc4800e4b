"""Building a layer from section `[moe]`: the one place that knows which class a name stands for."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.features.dispatch import DISPATCHES
from penstock.moe.config import MoEConfig
from penstock.moe.experts import ONE_SHARD, Experts, ExpertShard, GeluExperts, SharedExpert, SwiGLUExperts
from penstock.moe.gates import CosineRouter, ExpertChoiceRouter, NoisyRouter, SigmoidRouter, SoftRouter
from penstock.moe.hooks import Bfloat16Rows, Hook, Int8Rows
from penstock.moe.layer import MoELayer
from penstock.moe.permute.einsum import EinsumPermutation
from penstock.moe.permute.merged import MergedPermutation
from penstock.moe.permute.slots import BoundedPermutation, IndexPermutation
from penstock.moe.permute.sort import Permutation, SortPermutation
from penstock.moe.routers import ExpertBias, ExpertGroups, Router, SoftmaxRouter
from penstock.placement import ExpertPlacement


def build_layer(
    hidden_size: int,
    config: MoEConfig,
    *,
    ep_size: int = 1,
    ep_rank: int = 0,
    node_size: int = 1,
    layer: int = 0,
    placement: ExpertPlacement | None = None,
    shard: ExpertShard = ONE_SHARD,
) -> MoELayer:
    """Build the layer that `config` describes, with this rank's share of the experts.

    Args:
        ep_size: The number of ranks among which experts are spread.
        ep_rank: This rank's place among them.
        node_size: Ranks of an expert group in one node, for `dispatch = "node_once"`.
        layer: The number of the layer, for noise.
        placement: The ranks and slots of the experts; None: they are shared out in the order of their
            numbers.
        shard: The part of every expert that this rank has.

    Raises:
        PlacementError: If the experts cannot be shared evenly.
    """
    placement = placement or ExpertPlacement.even(config.num_experts, ep_size)
    return MoELayer(
        gate=build_router(hidden_size, config, layer),
        permutation=build_permutation(config, ep_size, ep_rank=ep_rank, node_size=node_size),
        expert=build_experts(hidden_size, config, placement.slots, shard),
        dispatch=DISPATCHES[dispatch_of(config)],
        hooks=build_hooks(hidden_size, config),
        shared=build_shared(hidden_size, config),
        ep_size=ep_size,
        ep_rank=ep_rank,
        balance=config.aux_loss_group,
        placement=placement,
    )


def dispatch_of(config: MoEConfig) -> str:
    """Return the name of the dispatch; `auto` is flat until the links are measured."""
    return "flat" if config.dispatch == "auto" else config.dispatch


def build_permutation(
    config: MoEConfig, ep_size: int, *, ep_rank: int = 0, node_size: int = 1
) -> Permutation:
    """Build the permutation that `config.permutation` names, or that the dispatch needs.

    Args:
        ep_size, ep_rank, node_size: See `build_layer`.
    """
    if DISPATCHES[dispatch_of(config)].joins_rows:
        return MergedPermutation(
            config.num_experts,
            config.top_k,
            ep_size,
            node_size=node_size,
            rank=ep_rank,
            capacity_factor=config.capacity_factor,
            min_capacity=config.min_capacity,
        )
    if config.permutation_name == "sort":
        if config.one_copy_per_rank:
            return MergedPermutation(config.num_experts, config.top_k, ep_size)
        if config.bound_factor is not None:
            return BoundedPermutation(config.num_experts, config.bound_factor)
        return SortPermutation(config.num_experts)
    permutation = IndexPermutation if config.permutation_name == "index" else EinsumPermutation
    factor = config.capacity_factor or 1.0  # a soft gate brings its slots along
    return permutation(config.num_experts, capacity_factor=factor, min_capacity=config.min_capacity)


def build_experts(
    hidden_size: int, config: MoEConfig, local_experts: int, shard: ExpertShard = ONE_SHARD
) -> Experts:
    """Build the experts that `config.expert` names."""
    experts = GeluExperts if config.expert == "gelu" else SwiGLUExperts
    return experts(hidden_size, config.moe_ffn_hidden_size, local_experts, shard)


def build_shared(hidden_size: int, config: MoEConfig) -> nn.Module | None:
    """Build the shared experts, one network of their summed width; None if there are none."""
    if config.shared_ffn_hidden_size == 0:
        return None
    experts = GeluExperts if config.expert == "gelu" else SwiGLUExperts
    return SharedExpert(experts(hidden_size, config.shared_ffn_hidden_size, 1))


def build_hooks(hidden_size: int, config: MoEConfig) -> tuple[Hook, ...]:
    """Build the hooks that `config` asks for."""
    if config.comm_dtype is None:
        return ()
    return (Bfloat16Rows() if config.comm_dtype == "bfloat16" else Int8Rows(hidden_size),)


def build_router(hidden_size: int, config: MoEConfig, layer: int) -> Router:
    """Build the gate that `config.gate` names.

    Args:
        layer: The number of the layer, for noise.
    """
    experts, top_k, scale = config.num_experts, config.top_k, config.routed_scaling_factor
    match config.gate:
        case "expert_choice":
            assert config.capacity_factor is not None, "refused by the configuration"
            factor, least = config.capacity_factor, config.min_capacity
            return ExpertChoiceRouter(
                hidden_size, experts, top_k=top_k, capacity_factor=factor, min_capacity=least, scale=scale
            )
        case "soft":
            return SoftRouter(hidden_size, experts, slots_per_expert=config.slots_per_expert)
    groups, rate = None, config.expert_bias_rate
    if config.expert_groups is not None:
        groups = ExpertGroups(groups=config.expert_groups[0], limit_to=config.expert_groups[1])
    options: dict[str, Any] = {
        "renormalise": config.renormalise,
        "scale": scale,
        "groups": groups,
        "bias": ExpertBias(experts, rate) if rate > 0 else None,
    }
    match config.gate:
        case "softmax":
            return SoftmaxRouter(hidden_size, experts, top_k, **options)
        case "noisy":
            return NoisyRouter(hidden_size, experts, top_k, place=layer, **options)
        case "sigmoid":
            return SigmoidRouter(hidden_size, experts, top_k, **options)
        case "cosine":
            width = min(config.gate_proj_size, hidden_size)
            return CosineRouter(hidden_size, experts, top_k, proj_size=width, **options)
