"""Reads what a run has left in its folder, as far as it exists: the run may be unfinished, or killed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from penstock.config import UNSET, ConfigError, asked, check_no_link, is_missing, read_text
from penstock.config.files import MOST_JSON_BYTES
from penstock.cost import ClusterFile
from penstock.plan import PlanFile
from penstock.report.loads import NUMBERS, LoadCourse
from penstock.report.page.findings import Course, FinishedRun
from penstock.report.summary import SUMMARY_FILE, RunSummary
from penstock.trace.step_file import STEP_FILE, StepFile
from penstock.train.metrics import MARKS, METRICS_FILE, StepMetrics, read_metrics
from penstock.train.output import CLUSTER_FILE, CONFIG, PLAN_FILE

T = TypeVar("T")

WHY_MISSING = {
    SUMMARY_FILE: "the run has not ended yet, or was killed, or an earlier version ran it",
    STEP_FILE: "it is written with every checkpoint, and there was none yet, so there is no timeline",
    PLAN_FILE: "the run went by section [schedule], so there is no other plan to compare",
    CLUSTER_FILE: "nothing was measured before the run",
    NUMBERS: "loads were not gathered (output.loads=false), or there was no checkpoint yet",
}
FAILURES = "failure-rank*.txt"
LATER_S = 60.0
"""Seconds for which metrics may still be written after a rank has left why it failed; clocks may differ."""

REMOVE = "Correct it, or move the file away."
BY_LAYER = ("aux_loss_by_layer", "rows_dropped", "rank_rows_max_over_mean", "loads_in_common")
"""Metrics that are drawn layer by layer."""


def read_run(folder: Path) -> FinishedRun:
    """Read a run's folder.

    Raises:
        ConfigError: Naming the folder, if it holds no run, or a damaged file.
    """
    if not asked(folder.is_dir):
        why = "is not a folder" if asked(folder.exists) else "there is no such folder"
        raise ConfigError("RUN", str(folder), why, "Give the output.dir of a run, such as runs/tiny.")
    steps = _steps(folder)
    missing: list[str] = []

    def found(name: str, read: Callable[[Path], T]) -> T | None:
        check_no_link(folder / name, REMOVE)
        if not is_missing(folder / name):
            return read(folder / name)
        missing.append(f"{name} is not there: {WHY_MISSING[name]}.")
        return None

    summary = found(SUMMARY_FILE, RunSummary.read)
    failures: tuple[str, ...] = ()
    if summary is None:  # older failures than the last metrics do not count
        since_s = (folder / METRICS_FILE).stat().st_mtime - LATER_S
        left = [path for path in sorted(folder.glob(FAILURES)) if path.lstat().st_mtime >= since_s]
        failures = tuple(f"{path.name}: {_text(path).partition(chr(10))[0]}" for path in left)
    return FinishedRun(
        name=str(folder),
        course=course_of(steps),
        settings=_text(folder / CONFIG),
        summary=summary,
        failures=failures,
        step=found(STEP_FILE, StepFile.read),
        plan=found(PLAN_FILE, PlanFile.read),
        cluster=found(CLUSTER_FILE, ClusterFile.read),
        loads=found(NUMBERS, LoadCourse.read),
        missing=tuple(missing),
    )


def course_of(steps: Sequence[StepMetrics]) -> Course:
    """Return the columns of what a run has recorded; a value that is not finite counts as none."""

    def column(name: str) -> tuple[Any, ...]:
        values = (getattr(each, name) for each in steps)
        return tuple(None if isinstance(each, float) and not math.isfinite(each) else each for each in values)

    columns = {field.name: column(field.name) for field in fields(Course)}
    return Course(**columns | {name: tuple(map(bool, columns[name])) for name in MARKS})


def _steps(folder: Path) -> list[StepMetrics]:
    path = folder / METRICS_FILE
    check_no_link(path, REMOVE)
    if is_missing(path):
        why = f"holds no run: there is no {METRICS_FILE} in it"
        raise ConfigError("RUN", str(folder), why, "Give the output.dir of a run, such as runs/tiny.")
    steps = read_metrics(path)
    for name in BY_LAYER:
        counts = {each.step: len(values) for each in steps if (values := getattr(each, name)) is not None}
        for step, layers in counts.items():
            first, wanted = next(iter(counts.items()))
            if layers != wanted:
                why = f"{name} has {layers} numbers (one per MoE layer) in step {step}, "
                why += f"{wanted} in step {first}"
                raise ConfigError(str(path), UNSET, why, REMOVE)
    return steps


def _text(path: Path) -> str:
    check_no_link(path, REMOVE)
    return "" if is_missing(path) else read_text(path, str(path), REMOVE, MOST_JSON_BYTES)
