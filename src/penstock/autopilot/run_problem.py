"""What a training run asks the planner."""

from __future__ import annotations

from penstock.autopilot.dispatch_choice import candidates
from penstock.cost import ClusterFile, ProfiledCluster
from penstock.plan import Problem
from penstock.topology import Layout
from penstock.train.assemble import base_shape, gradient_bytes, workload
from penstock.train.config import RunConfig


def run_problem(
    config: RunConfig, layout: Layout, file: ClusterFile, slowness: tuple[float, ...] | None = None
) -> Problem:
    """The step of this run on the cluster that `file` describes.

    slowness: see Problem; None = as in the file, if that is of as many ranks.
    """
    if slowness is None:
        slowness = file.slowness if file.ranks == layout.world_size else ()
    gradients = gradient_bytes(config.model, config.moe, layout)
    return Problem(
        shape=base_shape(config),
        workload=workload(config, layout, *gradients),
        cluster=ProfiledCluster.build(file),
        dispatches=tuple(candidates(config.moe, layout)),
        slowness=slowness,
    )


def assumed_problem(config: RunConfig, layout: Layout) -> Problem:
    """The step of this run on what section [cluster] assumes."""
    gradients = gradient_bytes(config.model, config.moe, layout)
    sizes = workload(config, layout, *gradients)
    return Problem(
        shape=base_shape(config), workload=sizes, cluster=config.cluster, dispatches=(sizes.dispatch,)
    )
