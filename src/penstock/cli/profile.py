"""`penstock profile`: measures the cluster, prints the findings, and saves them as a cluster file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from penstock.autotune.planned import decided
from penstock.autotune.problem import candidates, check_compatible
from penstock.autotune.profile import profile_run
from penstock.autotune.profile.sample import Limits
from penstock.autotune.profile.tasks import cuts, sample_of
from penstock.cli.failing import FAILED
from penstock.cli.out import check_folder, check_out, save_out
from penstock.cli.progress import progress_line
from penstock.cli.ranks import Emulated, measure_as_rank, on_ranks, processes_of
from penstock.config import ConfigError, load, to_dict
from penstock.cost import ClusterFile
from penstock.device import count_gpus
from penstock.extras import install, is_there, needs
from penstock.plan.plan_config import PlanConfig
from penstock.report.profile import profile_text
from penstock.report.profile_figure import draw_profile
from penstock.topology import Control, Layout, ProcessInfo, detect
from penstock.train.assemble import build_machinery, check_run, device_bytes, host_bytes, on_device
from penstock.train.config import RunConfig
from penstock.train.stopping import StopRequests
from penstock.words import terminal_width

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
MOST_BUDGET_S = 86400
"""A day, as in a benchmark."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The requests of the options, besides the configuration."""

    budget_s: float
    out: Path
    plot: Path | None
    json: bool

    def __post_init__(self) -> None:
        if self.plot is not None and not is_there("matplotlib"):
            raise ConfigError("--plot", str(self.plot), needs("matplotlib"), install("matplotlib"))
        if not 0 < self.budget_s <= MOST_BUDGET_S:
            why = f"must be above 0 and at most {MOST_BUDGET_S} seconds: measuring takes time, and has to end"
            raise ConfigError("--budget", self.budget_s, why, "Use 60.")


def profile(
    path: Path | None,
    overrides: Sequence[str],
    given: Sequence[str],
    wanted: Wanted,
    emulate: Emulated | None = None,
) -> int:
    """Measure and return the exit code; rank 0 prints the tables, or the cluster file as one JSON object."""
    info = detect(os.environ)
    config, ranks = _configured(path, overrides, info, emulate)
    here = ranks if emulate is None else emulate.devices  # ranks of a node, unless a launcher started them
    node_size = None if info is not None else here
    layout = Layout.build(config.parallel, ranks, 0, config.moe.num_experts, node_size)
    if not count_gpus():  # refused before any process starts
        check_run(config, layout, there_bytes=host_bytes(), sharing=ranks)
    if info is None:
        _check_places(wanted)
        # A dispatch, and every step that is measured, must be one that these ranks can run.
        candidates(config, layout)
        sample = replace(sample_of(config), plan=PlanConfig())
        for cut in cuts(sample):
            check_compatible(replace(sample, schedule=cut), layout)

    def work(rank: ProcessInfo) -> int:
        measure, finish = partial(_measure, config, wanted), partial(_finish, wanted=wanted)
        return measure_as_rank(rank, config.parallel, config.moe.num_experts, measure, finish)

    return on_ranks("penstock profile", given, ranks, config.parallel.timeout_s, emulate, work)


def _configured(
    path: Path | None, overrides: Sequence[str], info: ProcessInfo | None, emulate: Emulated | None
) -> tuple[RunConfig, int]:
    """Return the configuration for the number of ranks that there will be, and that number."""
    usual = () if path is not None else DEFAULTS
    if info is not None:
        ranks = info.world_size
    elif emulate is not None:
        ranks = emulate.ranks
    else:
        ranks = processes_of(load(RunConfig, path, [*usual, *overrides]))
    if path is None:
        usual = (*usual, f"moe.num_experts={max(2, ranks)}")
    return load(RunConfig, path, [*usual, *overrides]).resolved(ranks), ranks


def _check_places(wanted: Wanted) -> None:
    """Raise ConfigError if what is measured could not be saved."""
    check_out(wanted.out, EXAMPLE)
    check_folder(wanted.plot, "--plot")


def _measure(config: RunConfig, wanted: Wanted, layout: Layout, device: torch.device) -> ClusterFile:
    control = Control(layout.rank, layout.world_size)
    decided(control, partial(_check_places, wanted), "looking where the cluster file is to be")
    config = on_device(config, device)
    fits = partial(check_run, config, layout, there_bytes=device_bytes(device, control))
    control.agreed(fits, "comparing memory with the model")
    machinery = build_machinery(layout, device, config.parallel, config.train.precision)
    with StopRequests(machinery.control) as requests, progress_line(shown=layout.rank == 0):
        file = profile_run(
            config,
            machinery,
            budget_s=wanted.budget_s,
            name=wanted.out.stem,
            limits=Limits(asked=lambda: requests.asked),
        )
    machinery.close()
    return file


def _finish(file: ClusterFile, wanted: Wanted) -> int:
    """Save the file, then print it: printing may fail."""
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
    print(profile_text(file, terminal_width()))
    print(f"\nsaved as {wanted.out}" + (f"; figure in {figure}" if figure else ""))
    return 0
