"""Which dispatch a run uses: the one it names, or the fastest by the measured links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from penstock.cost import FittedCluster, StepCost
from penstock.dispatch import DISPATCHES
from penstock.moe import MoEConfig
from penstock.moe.config import DispatchName
from penstock.runtime import Machinery
from penstock.runtime.links import fit_links
from penstock.schedule import plan_step
from penstock.simulate import simulate
from penstock.topology import Layout
from penstock.train.assemble import base_shape, gradient_bytes, workload
from penstock.train.config import RunConfig

NAMES: tuple[DispatchName, ...] = tuple(name for name in get_args(DispatchName) if name in DISPATCHES)


@dataclass(frozen=True)
class DispatchChoice:
    """What was chosen. predicted_s: iteration by dispatch, with the links as measured; empty if not asked."""

    name: DispatchName
    predicted_s: Mapping[DispatchName, float]

    @property
    def line(self) -> str | None:
        """One line for people; None where there was nothing to choose."""
        if not self.predicted_s:
            return None
        times = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in self.predicted_s.items())
        return f"dispatch {self.name}: by the measured links a step takes {times}"


def candidates(moe: MoEConfig, layout: Layout) -> list[DispatchName]:
    """Dispatches that these ranks can run, and that the configuration leaves open.

    Raises ConfigError if it names one that they cannot run.
    """
    if moe.dispatch != "auto":
        if DISPATCHES[moe.dispatch].needs_table:
            layout.require_nodes("moe.dispatch", moe.dispatch)
        return [moe.dispatch]
    # In nodes of one rank every leg inside them would be a copy for nothing.
    return list(NAMES) if layout.ep_nodes > 1 and layout.ep_node_size > 1 else ["flat"]


def hierarchical_among(moe: MoEConfig, layout: Layout) -> list[DispatchName]:
    """The candidates with legs of their own to be measured."""
    return [name for name in candidates(moe, layout) if DISPATCHES[name].needs_table]


def choose_dispatch(config: RunConfig, machinery: Machinery) -> DispatchChoice:
    """The dispatch for `config` on these ranks; measures the links if there is a choice (a few seconds)."""
    layout = machinery.layout
    names = candidates(config.moe, layout)
    if len(names) == 1:
        return DispatchChoice(names[0], {})
    hierarchical = hierarchical_among(config.moe, layout)
    cluster = fit_links(machinery.transports, layout, machinery.control, config.cluster, hierarchical)
    cluster = machinery.control.gather(cluster, "comparing measured links")[0]  # all ranks choose alike
    predicted_s = {name: predict_iteration(name, config, layout, cluster) for name in names}
    return DispatchChoice(min(names, key=lambda name: predicted_s[name]), predicted_s)


def predict_iteration(name: DispatchName, config: RunConfig, layout: Layout, cluster: FittedCluster) -> float:
    """Simulated seconds of a step with this dispatch."""
    config = with_dispatch(config, name)
    gradients = gradient_bytes(config.model, config.moe, layout)
    sizes, pieces = workload(config, layout, *gradients), config.schedule.pieces(*gradients)
    plan = plan_step(
        config.schedule.system, base_shape(config), pieces, lambda cut: StepCost(cut, sizes, cluster)
    )
    ranks = layout.mesh
    cost = StepCost(plan.shape, sizes, cluster)
    return simulate(plan.schedule, plan.graph, cost, ranks).iteration_s


def with_dispatch(config: RunConfig, name: DispatchName) -> RunConfig:
    """The same run with this dispatch."""
    return replace(config, moe=replace(config.moe, dispatch=name))
