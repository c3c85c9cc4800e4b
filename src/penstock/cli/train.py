"""`penstock train`: starts the ranks, or is one of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.config import ConfigError, load
from penstock.report import RunSummary
from penstock.runtime import ScheduleMismatchError, TaskError
from penstock.topology import CommunicationError, ProcessInfo, detect, join, leave
from penstock.topology.join import ALONE
from penstock.train.assemble import pick_device
from penstock.train.config import RunConfig
from penstock.train.launcher import launch
from penstock.train.trainer import Trainer

FAILED, BAD_CONFIGURATION = 1, 2


def train(path: Path, overrides: Sequence[str], given: Sequence[str], *, json_wanted: bool) -> int:
    """Exit code of the run. A wrong configuration is refused before any process starts."""
    config = load(RunConfig, path, overrides)
    info = detect(os.environ)
    if info is None and config.parallel.processes > 1:
        return _start_ranks(config, given)
    return _be_rank(config, info or ALONE, json_wanted)


def _start_ranks(config: RunConfig, given: Sequence[str]) -> int:
    command = [sys.executable, "-m", "penstock", *given]
    # After a failure the others need up to one timeout to notice and to say what they waited for.
    outcome = launch(command, config.parallel.processes, grace_s=config.parallel.timeout_s + 10)
    if outcome.first_failure is not None and outcome.exit_code != BAD_CONFIGURATION:
        print(f"penstock: {outcome.first_failure.describe()}; {_way_out(config)}", file=sys.stderr)
    return outcome.exit_code


def _be_rank(config: RunConfig, info: ProcessInfo, json_wanted: bool) -> int:
    device = pick_device(info.local_rank)
    try:
        join(info, config.parallel.timeout_s, device)
        summary = Trainer(config, info, device, quiet=False).run()
    except ConfigError as error:
        if info.rank == 0:  # every rank finds the same fault; once is enough
            print(f"penstock: {error}", file=sys.stderr)
        return BAD_CONFIGURATION
    except (TaskError, CommunicationError, ScheduleMismatchError) as error:
        return _report_failure(config, info, error)
    leave()
    if info.rank == 0:
        _print_summary(summary, json_wanted)
    return end_of_rank(info)


def end_of_rank(info: ProcessInfo) -> int:
    """The exit code 0 of a rank that has closed and flushed all it has.

    One of several ranks leaves at once instead: a Gloo thread that still holds the last exchange's tensor
    needs the interpreter to free it, and aborts the process if the interpreter is shutting down by then.
    """
    if info.world_size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _report_failure(config: RunConfig, info: ProcessInfo, error: Exception) -> int:
    """One line on the terminal, all of it (the grid with the task marked) in a file."""
    headline, _, details = str(error).partition("\n")
    where = ""
    if details:
        report = config.output.dir / f"failure-rank{info.rank}.txt"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(str(error))
        where = f" (schedule with the task marked: {report})"
    print(f"penstock: {headline}{where}", file=sys.stderr, flush=True)
    # The process group is broken: destroying it in order could wait for peers that are gone.
    sys.stdout.flush()
    os._exit(FAILED)


def _print_summary(summary: RunSummary, json_wanted: bool) -> None:
    print(json.dumps(summary.to_dict()) if json_wanted else "\n" + summary.to_text(), flush=True)


def _way_out(config: RunConfig) -> str:
    saved = sorted((config.output.dir / "checkpoints").glob("step-*"))
    if not saved:
        return "no checkpoint had been written yet"
    return f"continue from {saved[-1].name} with train.resume=true"
