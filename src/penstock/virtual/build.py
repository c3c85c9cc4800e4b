"""From a configuration to a virtual device on this rank."""

from __future__ import annotations

from functools import partial

from penstock.runtime import Machinery
from penstock.topology import Layout
from penstock.train.assemble import base_shape, first_plan, gradient_bytes, workload
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
    return VirtualStack(
        base_shape(config, layout),
        workload(config, layout, gradient_bytes(config.model, config.moe, layout)),
        config.cluster,
        build_routing(config, virtual, layout),
        machinery,
        partial(first_plan, config, layout),
    )


def build_routing(config: RunConfig, virtual: VirtualConfig, layout: Layout) -> Routing:
    """The routing that [virtual] describes, for the batch of all ranks."""
    sizes = RoutingSizes(
        groups=layout.dp_size,
        samples=config.data.batch_per_device,
        seq_len=config.model.seq_len,
        moe_layers=sum(base_shape(config, layout).moe_layers),
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
    )
    if virtual.recorded is not None:
        return recorded_routing(virtual.recorded, sizes)
    return generated_routing(virtual, sizes)
