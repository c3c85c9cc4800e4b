"""The input of a report: everything that a run has left, as far as it exists."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost import ClusterFile
from penstock.plan import PlanFile
from penstock.report.loads import LoadCourse
from penstock.report.summary import RunSummary
from penstock.trace.step_file import StepFile

Values = tuple[float | None, ...]
ByLayer = tuple[tuple[float, ...] | None, ...]


@dataclass(frozen=True, kw_only=True)
class Course:
    """The steps of a run, each column as long as `steps`; None = a step has no such value.

    steps: their numbers. plans: which plan ran each. aux_loss, rows_dropped, rank_rows,
    loads_in_common: by MoE layer.
    """

    steps: tuple[int, ...]
    loss: Values
    eval_loss: Values
    eval_noise: Values
    tokens_per_s: Values
    iteration_s: Values
    communication_s: Values
    exposed_s: Values
    utilisation: Values
    peak_memory_bytes: Values
    plans: tuple[str | None, ...]
    skipped: tuple[bool, ...]
    aux_loss: ByLayer
    rows_dropped: ByLayer
    rank_rows: ByLayer
    loads_in_common: ByLayer


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What a run has left. name: of its folder. settings: the text of its configuration. failures: messages
    of ranks before they ended. missing: what does not exist, and why that may be, in sentences."""

    name: str
    course: Course
    settings: str
    summary: RunSummary | None = None
    step: StepFile | None = None
    plan: PlanFile | None = None
    cluster: ClusterFile | None = None
    loads: LoadCourse | None = None
    failures: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
