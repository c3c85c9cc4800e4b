"""Building a virtual device on this rank from a configuration."""

from __future__ import annotations

from functools import partial

from penstock.cost import routing_sizes
from penstock.lab.virtual.config import VirtualConfig
from penstock.lab.virtual.stack import VirtualStack
from penstock.runtime import Machinery
from penstock.train.assemble import base_shape, first_plan, workload
from penstock.train.config import RunConfig
from penstock.workloads import routing_of


def build_virtual(config: RunConfig, virtual: VirtualConfig, machinery: Machinery) -> VirtualStack:
    """Build this rank's device with its first plan. [cluster] says how fast the imitated devices compute.

    Every rank must call it at the same point. Raises ConfigError if recorded routing does not fit the model.
    """
    layout = machinery.layout
    shape = base_shape(config, layout)
    work = workload(config, layout)
    return VirtualStack(
        shape,
        work,
        config.cluster,
        routing_of(virtual, routing_sizes(work, sum(shape.moe_layers))),
        machinery,
        partial(first_plan, config, layout),
        config.placement,
    )
