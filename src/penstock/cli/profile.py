"""`penstock profile`: measures the cluster, prints the findings, and saves them as a cluster file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from penstock.autotune.problem import check_compatible, possible_dispatches
from penstock.autotune.profile.measure import profile_run
from penstock.autotune.profile.sample import Limits
from penstock.autotune.profile.tasks import cuts, sample_of
from penstock.cli.out import check_folder, check_out, config_and_settings, progress_line, save_out
from penstock.cli.ranks import Emulated, measure_as_rank, measured_run, on_ranks
from penstock.cli.run import FAILED, say
from penstock.config import ConfigError, to_dict
from penstock.cost import ClusterFile
from penstock.device import count_gpus
from penstock.extras import install, is_there, needs
from penstock.plan.plan_config import PlanConfig
from penstock.report.profile import draw_profile, profile_text
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


def profile(options: argparse.Namespace, given: Sequence[str], emulate: Emulated | None = None) -> int:
    """Measure and return the exit code; rank 0 prints the tables, or the cluster file as one JSON object."""
    if options.plot is not None and not is_there("matplotlib"):
        raise ConfigError("--plot", str(options.plot), needs("matplotlib"), install("matplotlib"))
    if not 0 < options.budget <= MOST_BUDGET_S:
        why = f"must be above 0 and at most {MOST_BUDGET_S} seconds: measuring takes time, and has to end"
        raise ConfigError("--budget", options.budget, why, "Use 60.")
    path, overrides = config_and_settings(options)
    info = detect(os.environ)
    config, ranks = measured_run(path, overrides, DEFAULTS, info, emulate)
    here = ranks if emulate is None else emulate.devices  # ranks of a node, unless a launcher started them
    node_size = None if info is not None else here
    layout = Layout.build(config.parallel, ranks, 0, config.moe.num_experts, node_size)
    if not count_gpus():  # refused before any process starts
        check_run(config, layout, there_bytes=host_bytes(), sharing=ranks)
    if info is None:
        _check_places(options)
        # A dispatch, and every step that is measured, must be one that these ranks can run.
        possible_dispatches(config, layout)
        sample = replace(sample_of(config), plan=PlanConfig())
        for cut in cuts(sample):
            check_compatible(replace(sample, schedule=cut), layout)

    def work(rank: ProcessInfo) -> int:
        measure, finish = partial(_measure, config, options), partial(_finish, options=options)
        return measure_as_rank(rank, config.parallel, config.moe.num_experts, measure, finish)

    return on_ranks("penstock profile", given, ranks, config.parallel.timeout_s, emulate, work)


def _check_places(options: argparse.Namespace) -> None:
    """Raise ConfigError if what is measured could not be saved."""
    check_out(options.out, EXAMPLE)
    check_folder(options.plot)


def _measure(
    config: RunConfig, options: argparse.Namespace, layout: Layout, device: torch.device
) -> ClusterFile:
    control = Control(layout.rank, layout.world_size)
    control.decided(partial(_check_places, options), "looking where the cluster file is to be")
    config = on_device(config, device)
    fits = partial(check_run, config, layout, there_bytes=device_bytes(device, control))
    control.agreed(fits, "comparing memory with the model")
    machinery = build_machinery(layout, device, config.parallel, config.train.precision)
    with StopRequests(machinery.control) as requests, progress_line(shown=layout.rank == 0):
        file = profile_run(
            config,
            machinery,
            budget_s=options.budget,
            name=options.out.stem,
            limits=Limits(stopped=lambda: requests.asked),
        )
    machinery.close()
    return file


def _finish(file: ClusterFile, options: argparse.Namespace) -> int:
    """Save the file, then print it: printing may fail."""
    if not save_out(file.save, options.out):
        return FAILED
    try:
        figure = None if options.plot is None else draw_profile(file, options.plot)
    except OSError as error:
        say(f"{error.filename or options.plot} could not be written: {error.strerror}")
        return FAILED
    if options.json:
        print(json.dumps(to_dict(file)))
        return 0
    print(profile_text(file, terminal_width()))
    print(f"\nsaved as {options.out}" + (f"; figure in {figure}" if figure else ""))
    return 0
