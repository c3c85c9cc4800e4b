"""`penstock bench`: schedules side by side."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from penstock.bench import BenchConfig
from penstock.bench.collectives import (
    Uplinks,
    measure_collectives,
    summarise_collectives,
)
from penstock.bench.compare import compare
from penstock.bench.dispatches import measure_dispatches, summarise_dispatches
from penstock.bench.drift import measure_drifts
from penstock.bench.field import Field, RealField
from penstock.bench.layer import measure_layer
from penstock.bench.peers import require
from penstock.bench.plan_field import PlanField
from penstock.bench.published import run_published
from penstock.bench.shipped import ShippedTransport
from penstock.bench.summarise import summarise
from penstock.bench.text import text_of
from penstock.bench.virtual_field import VirtualField
from penstock.cli.codes import BAD_USAGE, FAILED
from penstock.cli.ranks import start_ranks
from penstock.cli.train import end_of_rank
from penstock.config import ConfigError, load
from penstock.emulate import Cluster, EmulateConfig
from penstock.runtime import ScheduleMismatchError, TaskError
from penstock.runtime.host_memory import keep_freed_memory
from penstock.topology import (
    CommunicationError,
    Control,
    Layout,
    ProcessInfo,
    detect,
    find_node_size,
    join,
    lane_groups,
    leave,
)
from penstock.topology.join import ALONE
from penstock.train.assemble import build_machinery, pick_device
from penstock.train.fits import check_memory, host_bytes

Subject = Literal["schedules", "plan", "collectives", "dispatch", "layer", "drift", "published"]
"""What is measured: whole steps, or a part alone."""

JOINTLY_PLANNED = 60
"""Layers of each published grid that the joint search plans, too; all would take most of an hour."""

PARTS: dict[str, str] = {
    "plan": "the chosen plan and published ones",
    "drift": "training in which something changes",
    "published": "published layers, by simulation,",
    "collectives": "the transport",
    "dispatch": "ways to dispatch",
    "layer": "the MoE layer in one process",
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the options ask for, beside the configuration."""

    json: bool
    virtual: bool
    subject: Subject
    plot: Path | None
    peers: bool = False

    def __post_init__(self) -> None:
        useless = {"--virtual": self.virtual, "--plot": self.plot is not None, "--peers": self.peers}
        other = next((name for name, given in useless.items() if given), None)
        if self.subject != "schedules" and other is not None:
            option = f"--{self.subject}"
            hint = f"Leave {other} out, or {option}."
            raise ConfigError(
                option, True, f"measures {PARTS[self.subject]} and has no use for {other}", hint
            )


def suite(folder: Path) -> int:
    """Everything that BENCHMARKS.md shows; it and its figures are written to `folder`."""
    from penstock.bench.suite import SUITE, run_suite  # loads the plotting library

    return run_suite(SUITE, folder, sys.stderr)


def bench(
    path: Path | None,
    overrides: Sequence[str],
    given: Sequence[str],
    wanted: Wanted,
    emulate: EmulateConfig | None,
) -> int:
    """Exit code of the comparison; rank 0 prints the table or one JSON object."""
    config = load(BenchConfig, path, overrides)
    _check_together(config, wanted)
    _check_fits(config, wanted, emulate)
    info = detect(os.environ)
    if wanted.subject in ALONE_SUBJECTS:
        return _alone(wanted, info, emulate)
    if emulate is not None and info is not None and info.launcher != "penstock":
        why = f"ranks that {info.launcher} started already have a network"
        hint = "Start penstock bench itself, or leave --emulate out."
        raise ConfigError("--emulate", str(emulate.shape), why, hint)
    if info is None and emulate is not None:
        with Cluster(emulate) as cluster:
            return start_ranks(given, emulate.shape.ranks, config.parallel.timeout_s, cluster)
    if info is None and config.parallel.processes > 1:
        return start_ranks(given, config.parallel.processes, config.parallel.timeout_s)
    info = info or ALONE
    return end_of_rank(info, _be_rank(config, info, wanted, emulate))


def _check_together(config: BenchConfig, wanted: Wanted) -> None:
    if wanted.virtual and config.compare.peers:
        why = "other systems compute, and virtual devices sleep instead"
        raise ConfigError("--peers", ",".join(config.compare.peers), why, "Leave --virtual out.")
    if wanted.subject in ("schedules", "plan") and not wanted.virtual and config.moe.capacity_factor is None:
        why = "computation alone, without a network, has no routing to go by"
        hint = "Give a capacity factor such as 1.25, or use --virtual."
        raise ConfigError("moe.capacity_factor", "none", why, hint)
    for peer in config.compare.peers:
        require(peer)


def _check_fits(config: BenchConfig, wanted: Wanted, emulate: EmulateConfig | None) -> None:
    """Refuse a model that this machine has no memory for; where there are GPUs, torch says so."""
    if wanted.subject not in ("schedules", "plan") or wanted.virtual or torch.cuda.is_available():
        return
    info = detect(os.environ)
    ranks = config.parallel.processes if emulate is None else emulate.shape.ranks
    size = ranks if info is None else info.world_size
    layout = Layout.build(config.parallel, size, 0, config.moe.num_experts)
    batch = config.compare.batch_per_device
    sharing = ranks if info is None else 1
    check_memory(config.model, config.moe, batch, layout, there_bytes=host_bytes(), sharing=sharing)


def _be_rank(config: BenchConfig, info: ProcessInfo, wanted: Wanted, emulate: EmulateConfig | None) -> int:
    try:
        keep_freed_memory()
        join(info, config.parallel.timeout_s, pick_device(info.local_rank))
        node_size = find_node_size(Control(info.rank, info.world_size), info.local_rank)
        layout = Layout.build(config.parallel, info.world_size, info.rank, config.moe.num_experts, node_size)
        result = SUBJECTS[wanted.subject](config, layout, wanted, emulate)
    except ConfigError as error:
        if info.rank == 0:
            print(f"penstock: {error}", file=sys.stderr)
        return BAD_USAGE
    except (TaskError, CommunicationError, ScheduleMismatchError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return FAILED
    leave()
    if info.rank == 0:
        _print(result, wanted)
        if wanted.plot is not None:
            _plot(result.to_dict(), wanted.plot)
    return 0


class Result(Protocol):
    """What a benchmark found."""

    def to_dict(self) -> dict[str, Any]: ...


def _comparison(config: BenchConfig, layout: Layout, wanted: Wanted, emulate: EmulateConfig | None) -> Result:
    """Without an emulated cluster all ranks count as one node with a link of unknown rate."""
    field: Field
    if wanted.subject == "plan":
        field = PlanField(config, layout)
    else:
        field = VirtualField(config, layout) if wanted.virtual else RealField(config, layout)
    found = compare(field, config.compare)
    field.close()
    nodes = 1 if emulate is None else emulate.nodes
    return summarise(
        found, nodes=nodes, devices=layout.world_size // nodes, inter_rate_bit_per_s=_rate(emulate)
    )


def _collectives(
    config: BenchConfig, layout: Layout, wanted: Wanted, emulate: EmulateConfig | None
) -> Result:
    del wanted
    machinery = build_machinery(layout, torch.device("cpu"), config.parallel, "float32")
    shipped = ShippedTransport(partial(lane_groups, layout, config.parallel.timeout_s))
    found = measure_collectives(machinery.transports.inter, machinery.control, layout, shipped)
    return summarise_collectives(found, _uplinks(layout, emulate))


def _dispatch(config: BenchConfig, layout: Layout, wanted: Wanted, emulate: EmulateConfig | None) -> Result:
    del wanted
    machinery = build_machinery(layout, torch.device("cpu"), config.parallel, "float32")
    found = measure_dispatches(machinery.transports, layout, machinery.control, rounds=config.compare.rounds)
    return summarise_dispatches(found, _rate(emulate))


def _alone(wanted: Wanted, info: ProcessInfo | None, emulate: EmulateConfig | None) -> int:
    """In this process: there is nobody to talk to, or it starts all that it needs by itself."""
    if info is not None or emulate is not None:
        other = "--emulate" if emulate is not None else f"a start by {info.launcher if info else ''}"
        why = f"measures {PARTS[wanted.subject]} and has no use for {other}"
        raise ConfigError(f"--{wanted.subject}", True, why, "Leave it out.")
    _print(ALONE_SUBJECTS[wanted.subject](), wanted)
    return 0


def _print(result: Result, wanted: Wanted) -> None:
    plain = result.to_dict()
    print(json.dumps(plain) if wanted.json else text_of(plain))


SUBJECTS = {
    "schedules": _comparison,
    "plan": _comparison,
    "collectives": _collectives,
    "dispatch": _dispatch,
}
ALONE_SUBJECTS: dict[str, Callable[[], Result]] = {
    "layer": measure_layer,
    "drift": measure_drifts,
    "published": partial(run_published, joint_sample=JOINTLY_PLANNED, effort="low", workers=2),
}
"""What one process measures, or starts ranks for by itself."""


def _rate(emulate: EmulateConfig | None) -> float | None:
    return None if emulate is None else emulate.inter_rate_bit_per_s


def _uplinks(layout: Layout, emulate: EmulateConfig | None) -> Uplinks:
    if emulate is None:
        return Uplinks(nodes=1, devices=layout.world_size, inter_rate_bit_per_s=None)
    return Uplinks(
        nodes=emulate.nodes,
        devices=emulate.devices,
        inter_rate_bit_per_s=emulate.inter_rate_bit_per_s,
    )


def _plot(result: dict[str, Any], folder: Path) -> None:
    from penstock.bench.page import write_page  # both load large libraries
    from penstock.bench.plot import draw

    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    page.write_text(write_page({"comparison": result}, title="penstock bench"))
    for path in (*draw({"comparison": result}, folder).values(), page):
        print(f"written: {path}", file=sys.stderr)
