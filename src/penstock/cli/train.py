"""`penstock train`: starts the ranks, or is one of them."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.autopilot import Autopilot
from penstock.autopilot.layouts import check_some_layout
from penstock.cli.codes import BAD_USAGE, FAILED, INTERRUPTED
from penstock.cli.ranks import end_of_rank, processes_of, start_ranks
from penstock.config import ConfigError, load
from penstock.data import TextError
from penstock.emulate import Cluster, EmulateConfig
from penstock.plan.plan_config import AUTO, given_schedule
from penstock.report import RunSummary
from penstock.runtime import ScheduleMismatchError, TaskError
from penstock.runtime.host_memory import keep_freed_memory
from penstock.topology import CommunicationError, Layout, ProcessInfo, detect, join, leave
from penstock.topology.blame import give_up
from penstock.topology.join import ALONE
from penstock.topology.local import Places, limit_threads
from penstock.train.assemble import pick_device
from penstock.train.checkpoint import CheckpointError, complete_checkpoints
from penstock.train.config import RunConfig
from penstock.train.fits import check_memory, host_bytes
from penstock.train.health import DivergedError
from penstock.train.launcher import Place
from penstock.train.resume import require_checkpoint
from penstock.train.source import check_source
from penstock.train.trainer import Trainer
from penstock.train.wandb_sink import check_wandb
from penstock.words import terminal_width

EXPECTED = (TaskError, CommunicationError, ScheduleMismatchError, CheckpointError, DivergedError, TextError)


def train(
    path: Path,
    overrides: Sequence[str],
    given: Sequence[str],
    *,
    json_wanted: bool,
    emulate: EmulateConfig | None = None,
) -> int:
    """Exit code of the run, in a cluster of its own if `emulate` describes one.

    A wrong configuration is refused before any process starts.
    """
    config = load(RunConfig, path, given_schedule(overrides))
    info = detect(os.environ)
    if emulate is not None and (info is None or info.launcher != "penstock"):
        return _start_emulated(config, emulate, given, info)
    if info is not None:
        return _be_rank(config, info, json_wanted)
    processes, places = processes_of(config), Places.here()
    announced = "" if json_wanted else f"starting {places.describe(processes)}"
    if processes == 1:
        limit_threads()
        if announced:
            print(places.describe(1), flush=True)
        return _be_rank(config, ALONE, json_wanted)
    return _start_ranks(config, given, processes, announced=announced)


def _start_emulated(
    config: RunConfig, emulate: EmulateConfig, given: Sequence[str], info: ProcessInfo | None
) -> int:
    """One rank per device of the cluster, whatever parallel.processes says; ranks are told the same."""
    if info is not None:
        hint = "Start penstock train itself, or leave --emulate out."
        why = f"ranks that {info.launcher} started already have a network"
        raise ConfigError("--emulate", str(emulate.shape), why, hint)
    ranks, wanted = emulate.shape.ranks, config.parallel.processes
    if wanted not in (None, ranks):
        print(
            f"penstock: {emulate.shape} is {ranks} ranks, not parallel.processes = {wanted}", file=sys.stderr
        )
    with Cluster(emulate) as cluster:
        return _start_ranks(config, [*given, f"parallel.processes={ranks}"], ranks, cluster)


def _start_ranks(
    config: RunConfig, given: Sequence[str], processes: int, place: Place | None = None, announced: str = ""
) -> int:
    resolved = config.resolved(processes)  # what can be refused is refused before any process starts
    check_source(resolved)
    _check_layout(resolved, processes)
    require_checkpoint(config)
    check_wandb(config.metrics)
    if announced:
        print(announced, flush=True)
    return start_ranks(given, processes, config.parallel.timeout_s, place, lambda: _way_out(config))


def _check_layout(config: RunConfig, processes: int) -> None:
    """Refuse a run whose layout, or every possible one, does not divide or does not fit the memory."""
    there = None if torch.cuda.is_available() else host_bytes()
    if config.plan.layout == AUTO:
        check_some_layout(config, processes, there)
        return
    layout = Layout.build(config.parallel, processes, 0, config.moe.num_experts)
    if there is not None:
        check_memory(
            config.model,
            config.moe,
            config.data.batch_per_device,
            layout,
            there_bytes=there,
            sharing=processes,
            shared_copies=config.optimizer.shared_copies,
            separate_documents=config.data.separate_documents,
            again=config.plan.may_repeat_blocks,
        )


def _be_rank(config: RunConfig, info: ProcessInfo, json_wanted: bool) -> int:
    return end_of_rank(info, _train_as_rank(config, info, json_wanted))


def _train_as_rank(config: RunConfig, info: ProcessInfo, json_wanted: bool) -> int:
    try:
        device = pick_device(info.local_rank)
        keep_freed_memory()
        join(info, config.parallel.timeout_s, device)
        summary = Trainer(config, info, device, Autopilot, quiet=False).run()
    except ConfigError as error:
        if info.rank == 0:  # every rank finds the same fault; once is enough
            print(f"penstock: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except EXPECTED as error:
        return _report_failure(config, info, str(error))
    except Exception as error:
        headline = f"rank {info.rank}: {type(error).__name__}: {error}"
        return _report_failure(config, info, f"{headline}\n\n{traceback.format_exc()}")
    leave()
    if info.rank == 0:
        _print_summary(summary, json_wanted)
    return 0


def _report_failure(config: RunConfig, info: ProcessInfo, text: str) -> int:
    """One line on the terminal; what follows it (a grid with the task marked, a traceback) in a file."""
    headline, _, details = text.partition("\n")
    give_up(headline)
    where = ""
    if details:
        report = config.output.dir / f"failure-rank{info.rank}.txt"
        try:
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(text)
            where = f" (details: {report})"
        except OSError as error:  # a full disk is a likely reason for being here
            where = f"\n{details.strip()}\n({report} could not be written: {error.strerror})"
    print(f"penstock: {headline}{where}", file=sys.stderr)
    return FAILED


def _print_summary(summary: RunSummary, json_wanted: bool) -> None:
    print(
        json.dumps(summary.to_dict()) if json_wanted else "\n" + summary.to_text(terminal_width()), flush=True
    )


def _way_out(config: RunConfig) -> str:
    saved = complete_checkpoints(config.output.dir / "checkpoints")
    if not saved:
        return "no checkpoint has been written yet"
    return f"continue from {saved[-1].name} with train.resume=true"
