"""From a configuration to a virtual device on this rank."""

from __future__ import annotations

from functools import partial

import torch

from penstock.graph import StepShape
from penstock.models import GPT, ModelConfig
from penstock.moe import MoEConfig
from penstock.runtime import Machinery
from penstock.topology import Layout
from penstock.train.assemble import first_plan, workload
from penstock.train.config import RunConfig
from penstock.virtual.config import VirtualConfig
from penstock.virtual.recorded import recorded_routing
from penstock.virtual.routing import Routing, RoutingSizes, generated_routing
from penstock.virtual.stack import VirtualStack


def build_virtual(config: RunConfig, virtual: VirtualConfig, machinery: Machinery) -> VirtualStack:
    """The device of this rank with its first plan. [cluster] says how fast the imitated devices compute.

    Every rank must call it at the same point. Raises ConfigError if recorded routing does not fit the model.
    """
    layout = machinery.layout
    sizes = workload(config, layout, *gradient_bytes(config.model, config.moe, layout))
    return VirtualStack(
        base_shape(config),
        sizes,
        config.cluster,
        build_routing(config, virtual, layout),
        machinery,
        partial(first_plan, config, layout),
    )


def build_routing(config: RunConfig, virtual: VirtualConfig, layout: Layout) -> Routing:
    """The routing that [virtual] describes, for the batch of all ranks."""
    sizes = RoutingSizes(
        ranks=layout.world_size,
        samples=config.data.batch_per_device,
        seq_len=config.model.seq_len,
        moe_layers=sum(base_shape(config).moe_layers),
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
    )
    if virtual.recorded is not None:
        return recorded_routing(virtual.recorded, sizes)
    return generated_routing(virtual, sizes)


def base_shape(config: RunConfig) -> StepShape:
    """The uncut shape of a step, before a system transforms it."""
    moe_layers = tuple(config.model.is_moe(layer) for layer in range(config.model.num_layers))
    return StepShape(moe_layers=moe_layers, exchange_counts=config.moe.capacity_factor is None)


def gradient_bytes(
    model: ModelConfig, moe: MoEConfig, layout: Layout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of every layer's replicated gradients, and of its expert gradients if they have replicas.

    Read off the real model, built without memory for its weights.
    """
    with torch.device("meta"):
        parts = GPT(model, moe, ep_size=layout.ep_size, ep_rank=layout.ep_rank)
    layers = range(model.num_layers)
    replicated = [parts.replicated_parameters(layer) for layer in layers]
    experts = [parts.expert_parameters(layer) if layout.edp_size > 1 else [] for layer in layers]
    return _sizes_bytes(replicated), _sizes_bytes(experts)


def _sizes_bytes(layers: list[list[torch.nn.Parameter]]) -> tuple[int, ...]:
    return tuple(sum(parameter.nbytes for parameter in parameters) for parameters in layers)
