"""What a training run asks the planner, and what it leaves open."""

from __future__ import annotations

from penstock.config import ConfigError
from penstock.cost import ClusterConfig, ClusterFile, ProfiledCluster
from penstock.dispatch import DISPATCHES
from penstock.moe import MoEConfig
from penstock.plan import Problem
from penstock.topology import Layout, ParallelConfig
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
    gradients = gradient_bytes(config.model, config.moe, layout, sharded=config.optimizer.sharded)
    return Problem(
        shape=base_shape(config, layout),
        workload=workload(config, layout, gradients),
        cluster=cluster,
        dispatches=tuple(candidates(config.moe, layout)),
        slowness=slowness,
        movable=config.placement.movable,
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


def check_shared(moe: MoEConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError for parts of a layer that ranks which share cannot run, whatever a search chooses.

    It looks at all expert forms, so a part that only some of them can run is refused, too.
    """
    tensor, shards = parallel.mp_size > 1, parallel.esp_size > 1
    given = "or set plan.source=given and schedule.expert_form"
    if moe.gate == "soft" and tensor:
        why = "mixes all tokens of a sample, and a search looks at expert forms that split them, too"
        raise ConfigError("moe.gate", moe.gate, why, f"Use parallel.mp_size=1, {given}=s2.")
    if moe.one_copy_per_rank and (tensor or shards):
        why = (
            "sends one row for several experts, and a search looks at expert forms that count each by itself"
        )
        hint = "Set it to false" + ("." if shards else f", {given}=gather.")
        raise ConfigError("moe.one_copy_per_rank", True, why, hint)
    if moe.compression is not None and shards:
        why = "rounds what experts leave, and with parallel.esp_size > 1 those are partial sums"
        raise ConfigError("moe.compression", moe.compression, why, "Use none, or parallel.esp_size=1.")
