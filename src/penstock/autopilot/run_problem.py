"""What a training run asks the planner, and what it leaves open."""

from __future__ import annotations

from penstock.cost import ClusterConfig, ClusterFile, ProfiledCluster
from penstock.dispatch import DISPATCHES
from penstock.moe import MoEConfig
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
    return _problem(config, layout, ProfiledCluster.build(file), slowness)


def assumed_problem(config: RunConfig, layout: Layout) -> Problem:
    """The step of this run on what section [cluster] assumes."""
    return _problem(config, layout, config.cluster)


def _problem(
    config: RunConfig, layout: Layout, cluster: ClusterConfig, slowness: tuple[float, ...] = ()
) -> Problem:
    gradients = gradient_bytes(config.model, config.moe, layout)
    return Problem(
        shape=base_shape(config, layout),
        workload=workload(config, layout, gradients),
        cluster=cluster,
        dispatches=tuple(candidates(config.moe, layout)),
        slowness=slowness,
    )


def candidates(moe: MoEConfig, layout: Layout) -> list[str]:
    """Dispatches that these ranks can run, and that the configuration leaves open.

    Raises ConfigError if it names one that they cannot run.
    """
    if moe.dispatch != "auto":
        if DISPATCHES[moe.dispatch].needs_table:
            layout.require_nodes("moe.dispatch", moe.dispatch)
        return [moe.dispatch]
    # In nodes of one rank every leg inside them would be a copy for nothing.
    return list(DISPATCHES) if layout.ep_nodes > 1 and layout.ep_node_size > 1 else ["flat"]


def hierarchical_among(moe: MoEConfig, layout: Layout) -> list[str]:
    """The candidates with legs of their own to be measured."""
    return [name for name in candidates(moe, layout) if DISPATCHES[name].needs_table]
