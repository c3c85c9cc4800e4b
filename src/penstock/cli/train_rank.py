"""`penstock train`, as one of its ranks. Loads what training needs, which the start of ranks does without."""

from __future__ import annotations

import json
import traceback

from penstock.autopilot import Autopilot
from penstock.cli.codes import FAILED, INTERRUPTED
from penstock.cli.failing import NOT_BEGUN, say, tell
from penstock.cli.ranks import end_of_rank, refused
from penstock.config import ConfigError
from penstock.data import TextError
from penstock.report import RunSummary
from penstock.runtime import ScheduleMismatchError, TaskError
from penstock.runtime.host_memory import keep_freed_memory
from penstock.topology import CommunicationError, ProcessInfo, join, leave
from penstock.topology.blame import give_up
from penstock.train.assemble import pick_device
from penstock.train.checkpoint import CheckpointError
from penstock.train.config import RunConfig
from penstock.train.health import DivergedError
from penstock.train.trainer import Trainer
from penstock.words import terminal_width

EXPECTED = (TaskError, CommunicationError, ScheduleMismatchError, CheckpointError, DivergedError, TextError)


def be_rank(config: RunConfig, info: ProcessInfo, json_wanted: bool) -> int:
    """Train as this rank, which joins the others and prints if it is rank 0; return its exit code."""
    return end_of_rank(info, _train_as_rank(config, info, json_wanted))


def _train_as_rank(config: RunConfig, info: ProcessInfo, json_wanted: bool) -> int:
    trainer = None
    try:
        device = pick_device(info.local_rank)
        keep_freed_memory()
        join(info, config.parallel.timeout_s, device)
        trainer = Trainer(config, info, device, Autopilot, quiet=False)
        summary = trainer.run()
    except ConfigError as error:
        return refused(error)
    except KeyboardInterrupt:
        if trainer is None and info.rank == 0:
            say(NOT_BEGUN)
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
    """Print one line on the terminal; write the rest (a grid with the task marked, a traceback) to a file."""
    headline, _, details = text.partition("\n")
    give_up(headline)
    where = ""
    if details:
        report = config.output.dir / f"failure-rank{info.rank}.txt"
        try:
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(text, encoding="utf-8")
            where = f" (details: {report})"
        except OSError as error:  # a full disk is a likely reason for being here
            where = f"\n{details.strip()}\n({report} could not be written: {error.strerror})"
    tell(f"{headline}{where}")
    return FAILED


def _print_summary(summary: RunSummary, json_wanted: bool) -> None:
    print(
        json.dumps(summary.to_dict()) if json_wanted else "\n" + summary.to_text(terminal_width()), flush=True
    )
