"""Measure a cluster and a model on it: what comes out is a cluster file, which plans are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.autopilot.profiling.kernels import measure_kernels, rates_of
from penstock.autopilot.profiling.links import measure_links
from penstock.autopilot.profiling.machine import here, memory_bytes
from penstock.autopilot.profiling.tasks import time_tasks
from penstock.cost import ClusterConfig, ClusterFile
from penstock.cost.cluster_file import KernelModel, LinkModel, TaskModel
from penstock.runtime import Machinery
from penstock.topology import Layout
from penstock.train.config import RunConfig

BUDGET_S = 60.0
LINKS_SHARE, KERNELS_SHARE = 0.45, 0.25
"""Of the whole budget; of what computation has of it."""

LINKS_S = 4.0
"""How long links are measured for where no file is made of it."""

LEAST_LATENCY_S = 1e-7
"""A section [cluster] has no links without latency."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTasks:
    """What was measured of computation. rates: what `scale` in `tasks` multiplies is work by these."""

    tasks: tuple[TaskModel, ...]
    transfers_beside_compute: float
    jitter: float
    slowness: tuple[float, ...]
    rates: ClusterConfig
    kernels: tuple[KernelModel, ...] = ()


def profile_run(
    config: RunConfig,
    machinery: Machinery,
    *,
    budget_s: float = BUDGET_S,
    say: Callable[[str], None] | None = None,
    name: str = "this cluster",
) -> ClusterFile:
    """Measure links and computation for a resolved configuration; the same file on every rank.

    All ranks must call this together, and nothing else may use the machinery meanwhile. say: told what is
    being measured.
    """
    layout, say = machinery.layout, say or _say_nothing
    links: tuple[LinkModel, ...] = ()
    links_s = LINKS_SHARE * budget_s if layout.world_size > 1 else 0.0
    if layout.world_size > 1:
        say(f"measuring links between {layout.world_size} ranks, about {links_s:.0f} s")
        links = measure_links(config, machinery, links_s)
    say(f"measuring computation on all ranks at once, about {budget_s - links_s:.0f} s")
    measured = measure_tasks(config, machinery, budget_s - links_s)
    file = ClusterFile(
        name=name,
        nodes=layout.nodes,
        ranks_per_node=layout.world_size // layout.nodes,
        rates=rates_with_links(measured.rates, links),
        links=links,
        tasks=measured.tasks,
        kernels=measured.kernels,
        transfers_beside_compute=measured.transfers_beside_compute,
        jitter=measured.jitter,
        slowness=measured.slowness,
        memory_bytes=memory_bytes(machinery.control, machinery.device),
        measured=here(machinery.device),
        source=_source(config, layout),
    )
    return machinery.control.gather(file, "comparing cluster files")[0]


def measured_links(config: RunConfig, machinery: Machinery) -> ClusterFile:
    """The cluster with the links that plans rest on measured, and devices as section [cluster] assumes them.

    All ranks call it together and get the same; it takes some seconds.
    """
    layout = machinery.layout
    links = measure_links(config, machinery, LINKS_S, used_only=True) if layout.world_size > 1 else ()
    return ClusterFile(
        name="links as measured",
        nodes=layout.nodes,
        ranks_per_node=layout.world_size // layout.nodes,
        rates=rates_with_links(config.cluster, links),
        links=links,
    )


def measure_tasks(
    config: RunConfig, machinery: Machinery, budget_s: float, rates: ClusterConfig | None = None
) -> MeasuredTasks:
    """Compute tasks of the model, alone and beside traffic; the same on every rank.

    rates: of a file whose tasks these are to replace; None = measured, too.
    """
    kernels: tuple[KernelModel, ...] = ()
    kernels_s = 0.0
    if rates is None:
        kernels_s = KERNELS_SHARE * budget_s
        kernels = measure_kernels(config, machinery, kernels_s)
        rates = rates_of(config.cluster, kernels)
    found = time_tasks(config, machinery, rates, budget_s - kernels_s)
    return MeasuredTasks(
        tasks=found.tasks,
        transfers_beside_compute=found.transfers_beside_compute,
        jitter=found.jitter,
        slowness=found.slowness,
        rates=_with_overhead(rates, found.tasks),
        kernels=kernels,
    )


def _with_overhead(rates: ClusterConfig, tasks: tuple[TaskModel, ...]) -> ClusterConfig:
    """The overhead of a task that was not measured: the least of one that was."""
    overheads = [task.alpha_s for task in tasks if task.alpha_s > 0]
    return replace(rates, task_overhead_s=min(overheads)) if overheads else rates


def rates_with_links(rates: ClusterConfig, links: tuple[LinkModel, ...]) -> ClusterConfig:
    """Latency and bandwidth between two ranks that explain the measured all-to-alls."""
    for group, lane in (("ep", "link"), ("node", "intra")):
        found = next((x for x in links if (x.collective, x.group) == ("all_to_all", group)), None)
        if found is not None:
            others = found.ranks - 1
            latency_s = max(found.alpha_s / others, LEAST_LATENCY_S)
            rate = others / found.ranks / found.beta_s_per_byte
            if lane == "link":
                rates = replace(rates, link_latency_s=latency_s, link_bytes_per_s=rate, link_rate_of="device")
            else:
                rates = replace(rates, intra_latency_s=latency_s, intra_bytes_per_s=rate)
    return rates


def _source(config: RunConfig, layout: Layout) -> str:
    model, moe = config.model, config.moe
    text = (
        f"penstock profile: {layout.world_size} ranks, expert groups of {layout.ep_size}, hidden size "
        f"{model.hidden_size}, {moe.num_experts} experts of {moe.moe_ffn_hidden_size}, top {moe.top_k}, "
        f"{config.data.batch_per_device} samples of {model.seq_len} tokens per rank"
    )
    if moe.order_name == "sort":
        text += "; dropless routing, computation measured with as many slots as choices"
    return text


def _say_nothing(text: str) -> None:
    del text
