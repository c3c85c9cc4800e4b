"""`penstock bench`: schedules side by side."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from penstock.autotune.problem import check_compatible
from penstock.cli.out import check_folder, progress_line
from penstock.cli.ranks import measure_as_rank, on_ranks, say_unused
from penstock.config import ConfigError, load
from penstock.device import count_gpus
from penstock.lab.bench import BenchConfig, BenchResult, checkout
from penstock.lab.bench.compare import compare, summarise
from penstock.lab.bench.config import AUTO, STAYS, Named, processes_of_bench, variants
from penstock.lab.bench.field import Field, planned_field, schedules_field
from penstock.lab.bench.result import render
from penstock.lab.bench.scheduled import run_config_of, run_of
from penstock.lab.bench.virtual_field import VirtualField
from penstock.lab.commands.emulate import Emulation
from penstock.plan.plan_config import PlanConfig
from penstock.topology import Control, Layout, ProcessInfo, detect
from penstock.train.assemble import check_run, host_bytes
from penstock.train.possible import check_shares
from penstock.words import terminal_width


def bench(
    options: argparse.Namespace, overrides: Sequence[str], given: Sequence[str], emulate: Emulation | None
) -> int:
    """Run the comparison and return its exit code; rank 0 prints the table or one JSON object."""
    useless = [name for name in ("virtual", "plot", "schedules", "peers") if getattr(options, name)]
    if options.plan and useless:
        why = f"measures the chosen plan and published ones and has no use for --{useless[0]}"
        raise ConfigError("--plan", True, why, f"Leave --{useless[0]} out, or --plan.")
    config = load(BenchConfig, options.config, overrides)
    _check_together(config, options)
    if not options.virtual:
        _check_read(config, overrides)
    if not options.plan:
        _check_pieces(config)
    _check_fits(config, options, emulate)
    if detect(os.environ) is None:
        check_folder(options.plot)

    def work(info: ProcessInfo) -> int:
        measure = partial(_compare, config, options, emulate)
        finish = partial(_finish, options=options)
        return measure_as_rank(info, config.parallel, config.moe.num_experts, measure, finish)

    asked, timeout_s = config.parallel.processes, config.parallel.timeout_s
    if emulate is not None and asked != BenchConfig().parallel.processes and detect(os.environ) is None:
        say_unused(asked, emulate)
    ranks = processes_of_bench(config)
    return on_ranks("penstock bench", given, ranks, timeout_s, emulate, work)


def _check_together(config: BenchConfig, options: argparse.Namespace) -> None:
    """Refuse what cannot be compared, and options whose code is missing, before any process starts."""
    names = config.compare.peers
    for key in ("peers", "tune") if options.plan else ():
        if value := getattr(config.compare, key):
            why = "--plan measures the chosen plan and published ones, and does not follow it"
            raise ConfigError(f"compare.{key}", value, why, "Leave it out, or --plan.")
    for key in ("samples", "experts"):
        if (moves := getattr(config.placement, key)) not in ("auto", STAYS):
            why = "what moves is said by the names of schedules"
            hint = f"Use --virtual --schedules penstock+{moves}."
            raise ConfigError(f"placement.{key}", moves, why, hint)
    if options.virtual and names:
        why = "other systems compute, and virtual devices sleep instead"
        raise ConfigError("--peers", ",".join(names), why, "Leave --virtual out.")
    if names and not config.parallel.tp_size == config.parallel.etp_size == 1:
        why = (
            "other systems are compared only with parallel.tp_size = 1 and parallel.etp_size = 1 "
            "(docs/peers.md)"
        )
        raise ConfigError("compare.peers", list(names), why, "Leave --peers out, or set both to 1.")
    if not options.virtual and config.moe.capacity_factor is None:
        why = "computation alone, without a network, has no routing to go by"
        hint = "Give a capacity factor such as 1.25, or use --virtual."
        raise ConfigError("moe.capacity_factor", "none", why, hint)
    named = {name: Named.of(name) for name in config.compare.schedules}
    if not options.virtual and (moving := [name for name, each in named.items() if each.moves]):
        why = "what moves, and how rows travel, is compared on virtual devices only"
        raise ConfigError("--schedules", moving[0], why, "Add --virtual, or leave out what moves.")
    if options.virtual and (shared := [name for name, each in named.items() if each.shares]):
        why = "updates in shares are compared with real computation only"
        raise ConfigError("--schedules", shared[0], why, "Leave --virtual out, or the shares.")
    for name in names:
        checkout.peers(name).require(name)
    if options.plot is not None:
        checkout.figures(str(options.plot))


def _check_read(config: BenchConfig, overrides: Sequence[str]) -> None:
    """Refuse settings of virtual devices that were typed where there are none."""
    for override in overrides:
        section, _, name = override.partition("=")[0].strip().partition(".")
        if section == "virtual":
            value = getattr(config.virtual, name)
            raise ConfigError(f"virtual.{name}", value, "only virtual devices follow it", "Add --virtual.")


def _check_pieces(config: BenchConfig) -> None:
    """Refuse more microbatches than samples, which a schedule would find out after links were measured."""
    samples = config.compare.batch_per_device
    tried = (each for name in config.compare.schedules if name != AUTO for each in variants(config, name))
    pieces = max((each.microbatches for each in tried if each.reads("microbatches")), default=1)
    if pieces > samples:
        why = f"{pieces} microbatches (schedule.microbatches) need at least {pieces} samples"
        hint = f"Use compare.batch_per_device={pieces}, or schedule.microbatches={samples}."
        raise ConfigError("compare.batch_per_device", samples, why, hint)


def _check_fits(config: BenchConfig, options: argparse.Namespace, emulate: Emulation | None) -> None:
    """Refuse sizes that ranks cannot share, a contender whose step could not be built, and a model that does
    not fit this machine's memory; where there are GPUs, torch reports that."""
    info = detect(os.environ)
    ranks = processes_of_bench(config) if emulate is None else emulate.ranks
    size = ranks if info is None else info.world_size
    check_shares(config.model, config.moe, config.parallel, size)
    if info is None:
        node_size = ranks if emulate is None else emulate.devices
        planned = Layout.build(config.parallel, ranks, 0, config.moe.num_experts, node_size)
        for name in (AUTO,) if options.plan else config.compare.schedules:
            if name == AUTO:
                runs = [replace(run_config_of(config), plan=PlanConfig(mode="auto"))]
            else:
                runs = [run_of(config, name, variant) for variant in variants(config, name)]
            for run in runs:
                check_compatible(run, planned, computes=not options.virtual)
    if options.virtual or count_gpus():
        return
    layout = Layout.build(config.parallel, size, 0, config.moe.num_experts)
    sharing = ranks if info is None else 1
    check_run(run_config_of(config), layout, there_bytes=host_bytes(), sharing=sharing)


def _compare(
    config: BenchConfig,
    options: argparse.Namespace,
    emulate: Emulation | None,
    layout: Layout,
    device: torch.device,
) -> BenchResult:
    """Compare and summarise. Without an emulated cluster the rates of links are not known."""
    del device  # the compared systems run on the CPU
    control = Control(layout.rank, layout.world_size)
    control.agreed(lambda: check_folder(options.plot), "looking where figures are to be", by=0)
    with progress_line(shown=layout.rank == 0) as say:
        if options.plan:
            field: Field = planned_field(config, layout, say)
        elif options.virtual:
            field = VirtualField(config, layout, say)
        else:
            field = schedules_field(config, layout, say)
        measurements = compare(field, config.compare, say)
    field.close()
    if emulate is None:
        devices = layout.node_size or layout.world_size
        return summarise(measurements, nodes=layout.nodes, devices=devices, inter_rate_bit_per_s=None)
    return summarise(
        measurements,
        nodes=emulate.nodes,
        devices=emulate.devices,
        inter_rate_bit_per_s=emulate.inter_rate_bit_per_s,
        intra_rate_bit_per_s=emulate.intra_rate_bit_per_s,
    )


def _finish(result: BenchResult, options: argparse.Namespace) -> int:
    print(json.dumps(result.to_dict()) if options.json else render(result, terminal_width()))
    if options.plot is not None:
        for path in checkout.figures(str(options.plot)).write_figures(result.to_dict(), options.plot):
            print(f"saved as {path}", file=sys.stderr)
    return 0
