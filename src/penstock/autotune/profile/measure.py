"""Measures a cluster and a model on it; the result is a cluster file, from which plans are made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from penstock.autotune.problem import hierarchical_among
from penstock.autotune.profile.kernels import measure_kernels, rates_of
from penstock.autotune.profile.links import measure_links
from penstock.autotune.profile.sample import Limits, memory_bytes
from penstock.autotune.profile.tasks import measure_tasks
from penstock.cost import ClusterConfig, ClusterFile
from penstock.cost.cluster_file import LinkModel
from penstock.cost.clusters import UNNAMED
from penstock.cost.measured import OVERRAN, STOPPED
from penstock.decision import ScheduleConfig
from penstock.features.dispatch import DISPATCHES
from penstock.runtime import Machinery
from penstock.train.config import RunConfig

logger = logging.getLogger(__name__)

LINKS_SHARE, KERNELS_SHARE = 0.45, 0.25
"""Share of links in the whole budget; share of kernels in the budget of computation."""

LINKS_S = 4.0
"""How long links are measured where no file is made from the result."""

LEAST_LATENCY_S = 1e-7
"""Least latency of a link: section [cluster] does not allow 0."""


def profile_run(
    config: RunConfig,
    machinery: Machinery,
    *,
    budget_s: float,
    dtype: torch.dtype = torch.float32,
    name: str = UNNAMED,
    limits: Limits | None = None,
) -> ClusterFile:
    """Measure links and computation for a resolved configuration; return the same file on every rank.

    All ranks must call this together, and nothing else may use the machinery meanwhile.

    Args:
        budget_s: Seconds for everything together.
        dtype: Type of the model's parameters.
        name: The name of the cluster.
        limits: Whether this rank is asked to end as soon as it has the least that a file needs, and the clock
            by which measuring ends even where this least takes too long; the file then lists this among its
            doubts.
    """
    limits, ranks = limits or Limits(), machinery.layout.world_size
    links_s = LINKS_SHARE * budget_s if ranks > 1 else 0.0
    if ranks > 1:
        logger.debug(f"measuring links between {ranks} ranks, about {links_s:.0f} s")
    file = profile_links(config, machinery, budget_s=links_s, used_only=False, limits=limits)
    left_s = budget_s - links_s
    logger.debug(f"measuring computation on all ranks at once, about {left_s:.0f} s")
    kernels_s = KERNELS_SHARE * left_s
    kernels = measure_kernels(config, machinery, dtype, kernels_s, limits)
    model, moe = config.model, config.moe
    layout = machinery.layout
    source = (
        f"penstock profile: {layout.world_size} ranks, expert groups of {layout.ep_size}, hidden size "
        f"{model.hidden_size}, {moe.num_experts} experts of {moe.moe_ffn_hidden_size}, top {moe.top_k}, "
        f"{config.data.batch_per_device} samples of {model.seq_len} tokens per rank"
    )
    if moe.permutation_name == "sort":
        source += "; dropless routing, computation measured with as many slots as choices"
    rates = rates_of(file.rates, kernels)
    file = replace(file, name=name, rates=rates, kernels=kernels, source=source)
    if dtype.itemsize < torch.float32.itemsize:
        file = replace(file, precision="bfloat16")
    file = measure_tasks(config, machinery, left_s - kernels_s, file, limits=limits, dtype=dtype)
    there_bytes = memory_bytes(machinery.control, machinery.device)  # now that all communicators are there
    file = replace(file, memory_bytes=there_bytes)
    stopped = machinery.control.any(limits.stopped(), "agreeing whether measuring was stopped")
    return replace(file, doubts=(STOPPED, *file.doubts)) if stopped else file


def profile_layout(
    config: RunConfig, machinery: Machinery, *, budget_s: float, first: ClusterFile | None
) -> ClusterFile:
    """Measure what layouts are compared by: as `profile_run`, and after a first layout links and tasks only.

    Args:
        first: The file of the first layout, if there was one. Tasks are lines over their work by its rates,
            so that both files can complete each other.
    """
    if first is None:
        return profile_run(config, machinery, budget_s=budget_s)
    links_s, limits = LINKS_SHARE * budget_s, Limits()
    links = measure_links(machinery, hierarchical_among(config, machinery.layout), links_s, limits=limits)
    return measure_tasks(config, machinery, budget_s - links_s, replace(first, links=links), limits=limits)


def profile_schedules(
    config: RunConfig, machinery: Machinery, schedules: Sequence[ScheduleConfig], budget_s: float
) -> ClusterFile:
    """Measure only that on which predictions of these schedules rest; otherwise as `profile_run`.

    Args:
        budget_s: Seconds for compute tasks, at the sizes that the schedules cut; links take as long before,
            and at most `LINKS_S`.
    """
    limits = Limits()
    file = profile_links(config, machinery, budget_s=min(LINKS_S, budget_s), limits=limits)
    return measure_tasks(config, machinery, budget_s, file, schedules, limits=limits)


def profile_links(
    config: RunConfig,
    machinery: Machinery,
    dispatches: Sequence[str] = (),
    *,
    budget_s: float = LINKS_S,
    used_only: bool = True,
    limits: Limits | None = None,
) -> ClusterFile:
    """Measure the links on which plans rest, for some seconds; devices are as section [cluster] assumes them.

    All ranks call it together and get the same file.

    Args:
        dispatches: Dispatches whose legs are measured in addition to those that the configuration leaves
            open.
        used_only: Whether to leave out links on which no plan rests.
    """
    limits = limits or Limits()
    layout = machinery.layout
    legged = [name for name in dispatches if DISPATCHES[name].needs_table]
    legs_of = dict.fromkeys([*hierarchical_among(config, layout), *legged])
    links = measure_links(machinery, legs_of, budget_s, used_only=used_only, limits=limits)
    return ClusterFile(
        name=UNNAMED,
        nodes=layout.nodes,
        ranks_per_node=layout.node_size or layout.world_size,
        rates=rates_with_links(config.cluster, links, layout.nodes),
        links=links,
        precision="float32" if machinery.autocast_dtype is None else "bfloat16",
        doubts=(OVERRAN,) if limits.overran else (),
    )


def rates_with_links(rates: ClusterConfig, links: tuple[LinkModel, ...], nodes: int) -> ClusterConfig:
    """Return the rates with latency and bandwidth between two ranks that explain the measured all-to-alls.

    Args:
        nodes: Number of nodes; in a single one all links are inside it.
    """
    known = [x for x in links if x.collective == "all_to_all" and (nodes == 1 or x.nodes is not None)]
    for lane, crosses in (("intra", False), ("link", nodes > 1)):
        even = [line for line in known if ((line.nodes or 1) > 1) == crosses]
        if not even:
            continue
        line, sharing = even[0], _sharing(links, nodes) if crosses else 1
        latency_s = max(line.alpha_s / (line.ranks - 1), LEAST_LATENCY_S)
        passing = 1 - 1 / ((crosses and line.nodes) or line.ranks)
        rate = sharing * passing / line.beta_s_per_byte
        rates = rates.measured(**{f"{lane}_latency_s": latency_s, f"{lane}_bytes_per_s": rate})
        if lane == "link":
            rates = replace(rates, link_rate_of="device" if sharing == 1 else "node")
    return rates


def _sharing(links: tuple[LinkModel, ...], nodes: int) -> int:
    """Return how many devices share a network card: those of a node, or 1, also if that is unknown.

    A device that sends alone has a shared card to itself; with a card of its own it is no faster than when
    all send. The measured rate is closer to one of the two. It is unknown where no group has all ranks:
    several groups are measured at the same time and share cards, too.
    """
    world = max((link.ranks for link in links), default=0)
    even, alone = (
        next((link for link in links if (link.collective, link.ranks) == (name, world)), None)
        for name in ("all_to_all", "point_to_point")
    )
    if even is None or alone is None:
        return 1
    devices, own = world // nodes, (1 - 1 / nodes) / even.beta_s_per_byte
    return devices if 1 / alone.beta_s_per_byte > own * devices**0.5 else 1
