"""`penstock train`, as one of its ranks. Loads what training needs, which the start of ranks does without."""

from __future__ import annotations

import json
import logging
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from penstock.autotune import Autotuner
from penstock.checkpoint.storage import CheckpointError
from penstock.cli.ranks import Left, end_of_rank, refused
from penstock.cli.run import FAILED, FULL, NOT_BEGUN, put, tell
from penstock.config import ConfigError, asked
from penstock.data import TextError
from penstock.device import pick_device
from penstock.graph import RefusalError
from penstock.report import RunSummary
from penstock.report.summary import SUMMARY_FILE
from penstock.runtime import ScheduleMismatchError, TaskError
from penstock.runtime.machinery import keep_freed_memory
from penstock.stops import STOPS
from penstock.topology import CommunicationError, ProcessInfo, join, leave
from penstock.topology.faults import give_up
from penstock.train.config import RunConfig
from penstock.train.logs import RankLog
from penstock.train.metrics import METRICS_FILE
from penstock.train.model import decoder_of
from penstock.train.optimizer import DivergedError
from penstock.train.output import OutputError
from penstock.train.resume import RunCompleteError
from penstock.train.trainer import Trainer
from penstock.words import terminal_width
from penstock.writing import write_whole

logger = logging.getLogger(__name__)

EXPECTED = (
    TaskError,
    CommunicationError,
    ScheduleMismatchError,
    CheckpointError,
    DivergedError,
    OutputError,
    TextError,
)


def be_rank(config: RunConfig, info: ProcessInfo, json_wanted: bool) -> int:
    """Train as this rank, which joins the others and prints if it is rank 0; return its exit code."""
    with RankLog(info.rank) as log:
        code = _Rank(config, info, log).code(json_wanted)
    return end_of_rank(info, code)


class _Rank:
    """This rank's part in a run, as far as it has come."""

    def __init__(self, config: RunConfig, info: ProcessInfo, log: RankLog) -> None:
        self._config, self._info, self._log = config, info, log
        self._trainer: Trainer | None = None
        self._complete: RunCompleteError | None = None
        self._left = Left(config)

    def code(self, json_wanted: bool) -> int:
        """Train, report, and return the exit code."""
        STOPS.says(self._left_now)
        try:
            code = self._train()
            STOPS.finish(code)
        except KeyboardInterrupt:
            if self._summary is None and self._complete is None:
                return STOPS.stopped()
            code = 0  # the stop came too late to change anything
            STOPS.finish(code)
        if code == 0:
            leave()
        if code == 0 and self._info.rank == 0:
            if self._complete is not None:
                _print_complete(self._complete, self._config.output.dir, json_wanted)
            else:
                assert self._summary is not None, "the run has ended"
                _print_summary(self._summary, json_wanted)
        return code

    @property
    def _summary(self) -> RunSummary | None:
        return None if self._trainer is None else self._trainer.summary

    def _left_now(self) -> str:
        return self._left.by_a_stop() if self._began else NOT_BEGUN

    @property
    def _began(self) -> bool:
        return self._trainer is not None and self._trainer.began

    def _train(self) -> int:
        config, info = self._config, self._info
        try:
            device = pick_device(info.local_rank)
            keep_freed_memory()
            waits = config.parallel
            join(info, waits.timeout_s, device, waits.transport, start_s=waits.start_s)
            make_model, log = decoder_of, self._log
            # Only models of transformers need what loads for half a second.
            if config.model.config is not None:
                from penstock.adapt.run import model_of_run

                make_model = model_of_run
            self._trainer = Trainer(
                config, info, device, Autotuner, quiet=False, make_model=make_model, log=log
            )
            self._trainer.run()
        except RunCompleteError as complete:
            logger.info(f"the run is complete: {complete}")
            self._complete = complete
        except (ConfigError, RefusalError) as error:
            return refused(error)
        except EXPECTED as error:
            return self._report_failure(str(error))
        except Exception as error:
            headline = f"rank {info.rank}: {type(error).__name__}: {error}"
            full = isinstance(error, OSError) and error.errno in FULL
            details = "" if full else f"\n\n{traceback.format_exc()}"
            return self._report_failure(f"{headline}{details}", unexpected=True)
        return 0

    def _report_failure(self, text: str, *, unexpected: bool = False) -> int:
        """Print a line on the terminal; write the rest (a grid with the task marked, a traceback) to a file.

        unexpected: whether the rest is printed where it cannot be written. Raises KeyboardInterrupt instead
        after a stop: what it interrupts, and ranks that end, look like errors.
        """
        if STOPS.heard:
            raise KeyboardInterrupt
        headline, _, details = text.partition("\n")
        give_up(headline)
        where, shown = "", f"\n{details.strip()}\n" if unexpected else " "
        report = self._config.output.dir / f"failure-rank{self._info.rank}.txt"
        if details and not self._owns_folder:
            where = f"\n{details.strip()}"
        elif details:
            try:
                report.parent.mkdir(parents=True, exist_ok=True)
                write_whole(report, text)
                where = f" (details: {report})"
            except OSError as error:  # a full disk is a likely reason for being here
                where = f"{shown}({report} could not be written: {error.strerror})"
        logger.error(f"{headline}{where}")
        tell(f"{headline}{where}")
        return FAILED

    @property
    def _owns_folder(self) -> bool:
        """Whether no other run's reports are there: an earlier run is moved aside when this begins."""
        folder, resume = self._config.output.dir, self._config.train.resume
        return self._began or resume is True or not asked((folder / METRICS_FILE).exists)


def _print_summary(summary: RunSummary, json_wanted: bool) -> None:
    text = summary.to_text(terminal_width())
    logger.debug(f"summary\n{text}{summary.details()}")  # what follows is for the terminal
    put(json.dumps(summary.to_dict()) if json_wanted else "\n" + text)


def _print_complete(run: RunCompleteError, folder: Path, json_wanted: bool) -> None:
    """Print what the start that did the last step has left, or else, as JSON, what is known without that."""
    summary: RunSummary | None = None
    with suppress(ConfigError):  # there is none if that start was killed then
        summary = RunSummary.read(folder / SUMMARY_FILE)
    if summary is not None and summary.steps == run.steps:
        # One that was stopped at this step is complete where no more are wanted.
        _print_summary(replace(summary, interrupted=False), json_wanted)
    elif json_wanted:
        known = {"steps": run.steps, "interrupted": False, "outputs": {"checkpoint": str(run.path)}}
        put(json.dumps(known))
