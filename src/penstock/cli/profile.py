"""`penstock profile`: measure the cluster, print what was found, save it as a cluster file."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from penstock.autopilot.deciding import decided
from penstock.autopilot.profiling import profile_run
from penstock.cli.codes import BAD_USAGE, FAILED
from penstock.cli.out import check_out, save_out
from penstock.cli.ranks import start_ranks
from penstock.cli.train import end_of_rank
from penstock.config import ConfigError, load, to_dict
from penstock.cost import ClusterFile
from penstock.emulate import Cluster, EmulateConfig
from penstock.report.profile import profile_text
from penstock.report.profile_figure import draw_profile
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
    leave,
)
from penstock.topology.join import ALONE
from penstock.train.assemble import build_machinery, pick_device
from penstock.train.config import RunConfig
from penstock.train.fits import check_memory, device_bytes, host_bytes

DEFAULTS = (
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.seq_len=256",
    "moe.moe_ffn_hidden_size=1024",
    'moe.expert="gelu"',
    "moe.capacity_factor=1.25",
    "data.batch_per_device=4",
    "parallel.processes=2",
)
"""The model that `penstock bench` runs, small enough for one core per rank. It has an expert per rank."""

EXAMPLE = "cluster.json"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the options ask for, beside the configuration."""

    budget_s: float
    out: Path
    plot: Path | None
    json: bool

    def __post_init__(self) -> None:
        if not 0 < self.budget_s < math.inf:
            raise ConfigError("--budget", self.budget_s, "measuring takes time, and has to end", "Use 60.")


def profile(
    path: Path | None,
    overrides: Sequence[str],
    given: Sequence[str],
    wanted: Wanted,
    emulate: EmulateConfig | None = None,
) -> int:
    """Exit code; rank 0 prints the tables, or the cluster file as one JSON object."""
    info = detect(os.environ)
    if emulate is not None and info is not None and info.launcher != "penstock":
        why = f"ranks that {info.launcher} started already have a network"
        hint = "Start penstock profile itself, or leave --emulate out."
        raise ConfigError("--emulate", str(emulate.shape), why, hint)
    config, ranks = _configured(path, overrides, info, emulate)
    layout = Layout.build(config.parallel, ranks, 0, config.moe.num_experts)
    if not torch.cuda.is_available():  # refused before any process starts
        batch, there = config.data.batch_per_device, host_bytes()
        check_memory(config.model, config.moe, batch, layout, there_bytes=there, sharing=ranks)
    if info is None:
        check_out(wanted.out, EXAMPLE)
    start = partial(start_ranks, given, ranks, config.parallel.timeout_s)
    if info is None and emulate is not None:
        with Cluster(emulate) as cluster:
            return start(cluster)
    if info is None and ranks > 1:
        return start()
    info = info or ALONE
    return end_of_rank(info, _be_rank(config, info, wanted))


def _configured(
    path: Path | None, overrides: Sequence[str], info: ProcessInfo | None, emulate: EmulateConfig | None
) -> tuple[RunConfig, int]:
    """The configuration for as many ranks as there will be, and that number."""
    usual = () if path is not None else DEFAULTS
    ranks = load(RunConfig, path, [*usual, *overrides]).parallel.processes
    if info is not None:
        ranks = info.world_size
    elif emulate is not None:
        ranks = emulate.shape.ranks
    if path is None:
        usual = (*usual, f"moe.num_experts={max(2, ranks)}")
    return load(RunConfig, path, [*usual, *overrides]).resolved(ranks), ranks


def _be_rank(config: RunConfig, info: ProcessInfo, wanted: Wanted) -> int:
    leader = info.rank == 0
    try:
        keep_freed_memory()
        device = pick_device(info.local_rank)
        join(info, config.parallel.timeout_s, device)
        control = Control(info.rank, info.world_size)
        decided(control, partial(check_out, wanted.out, EXAMPLE), "looking where the cluster file is to be")
        node_size = find_node_size(control, info.local_rank)
        layout = Layout.build(config.parallel, info.world_size, info.rank, config.moe.num_experts, node_size)
        batch, there = config.data.batch_per_device, device_bytes(device)
        check_memory(config.model, config.moe, batch, layout, there_bytes=there)
        machinery = build_machinery(layout, device, config.parallel, config.train.precision)
        file = profile_run(
            config, machinery, budget_s=wanted.budget_s, say=_say if leader else None, name=wanted.out.stem
        )
    except ConfigError as error:
        if leader:
            print(f"penstock: {error}", file=sys.stderr)
        return BAD_USAGE
    except (TaskError, CommunicationError, ScheduleMismatchError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return FAILED
    machinery.lanes.close()
    leave()
    return _finish(file, wanted) if leader else 0


def _finish(file: ClusterFile, wanted: Wanted) -> int:
    """Save first: what is printed is of less worth than what was measured."""
    if not save_out(file.save, wanted.out):
        return FAILED
    try:
        figure = None if wanted.plot is None else draw_profile(file, wanted.plot)
    except OSError as error:
        print(
            f"penstock: {error.filename or wanted.plot} could not be written: {error.strerror}",
            file=sys.stderr,
        )
        return FAILED
    if wanted.json:
        print(json.dumps(to_dict(file)))
        return 0
    print(profile_text(file))
    print(f"\nsaved as {wanted.out}" + (f", drawn in {figure}" if figure else ""))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
