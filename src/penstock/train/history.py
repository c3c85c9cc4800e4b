"""What is kept of the steps of a run, however long it is, and the summary and the pictures made of that.

Shapes: Y MoE layers, E experts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Final

import numpy as np

from penstock.placement import ExpertPlacement
from penstock.report import RunSummary
from penstock.report.loads import NUMBERS, LoadCourse
from penstock.runtime import PipelinedStack
from penstock.runtime.gradients import assign
from penstock.sharding import shardings_of
from penstock.train.config import RunConfig
from penstock.train.curves import TENSORBOARD_FOLDER
from penstock.train.load_figures import Whole
from penstock.train.metrics import METRICS_FILE, StepMetrics
from penstock.train.output import CLUSTER_FILE, PLAN_FILE
from penstock.train.source import Source
from penstock.train.tracing import StepAnalysis

MOST_KEPT: Final = 256
WARM_UP_STEPS: Final = 2
"""The first steps allocate buffers and open connections; medians leave them out."""

TYPICAL: Final = (
    "tokens_per_s",
    "model_flops_utilisation",
    "iteration_s",
    "exposed_communication_s",
    "communication_s",
    "rank_rows_max_over_mean",
    "rows_crossing_nodes",
    "loads_in_common",
)
"""Numbers whose median a summary has; a number per layer counts as its mean over layers."""


class History:
    """The steps of one start: eight bytes per step for every number whose median is wanted.

    first, last_applied: of the steps that were not skipped; None as long as there is none. last: of all
    steps.
    """

    def __init__(self) -> None:
        self.first: StepMetrics | None = None
        self.last_applied: StepMetrics | None = None
        self.last: StepMetrics | None = None
        self.skipped, self.tokens = 0, 0.0
        self._columns = {name: array("d") for name in TYPICAL}

    def add(self, metrics: StepMetrics) -> None:
        """Add one more step."""
        self.last = metrics
        self.tokens += metrics.tokens_per_s * metrics.iteration_s
        if metrics.skipped:
            self.skipped += 1
        else:
            self.first = self.first or metrics
            self.last_applied = metrics
        for name, column in self._columns.items():
            value = getattr(metrics, name)
            if isinstance(value, tuple):
                value = fmean(value) if value else None
            column.append(math.nan if value is None else value)

    def typical(self, name: str) -> float | None:
        """Return the median of a number over the steps that have it; None if none has."""
        column = self._columns[name]
        known = [value for value in column[WARM_UP_STEPS:] or column if not math.isnan(value)]
        return median(known) if known else None


@dataclass
class LoadBook:
    """Loads over a run, of every step at first; beyond MOST_KEPT steps every other one is dropped."""

    _steps: list[int] = field(default_factory=list)
    _loads: list[Whole] = field(default_factory=list)
    _every: int = 1

    def add(self, step: int, loads_YE: Whole) -> None:
        """Add the loads of step number `step`, which ascends."""
        if step % self._every:
            return
        self._steps.append(step)
        self._loads.append(loads_YE)
        if len(self._steps) > MOST_KEPT:
            self._every *= 2
            kept = [i for i, held in enumerate(self._steps) if held % self._every == 0]
            self._steps, self._loads = [self._steps[i] for i in kept], [self._loads[i] for i in kept]

    @staticmethod
    def resumed(folder: Path, done: int) -> LoadBook:
        """Return what an earlier start kept of steps up to `done`. Raises ConfigError for a damaged file."""
        book, path = LoadBook(), folder / NUMBERS
        if done and path.exists():
            course = LoadCourse.read(path)
            for step, loads_YE in zip(course.steps, course.loads_SYE, strict=True):
                if step <= done:
                    book.add(step, loads_YE)
        return book

    def course(self, layers: Sequence[int]) -> LoadCourse | None:
        """Return what is drawn; None where no loads are known. layers: numbers of the MoE layers."""
        if not self._steps:
            return None
        return LoadCourse(tuple(layers), tuple(self._steps), np.stack(self._loads))


def summarise(
    config: RunConfig,
    stack: PipelinedStack,
    source: Source,
    history: History,
    *,
    checkpoint: Path | None,
    analysis: StepAnalysis,
    loads: Path | None,
    whole_s: float,
    peak: str | None,
) -> RunSummary:
    """Return the summary of one start, of which a step was not skipped: medians, first and last losses.

    whole_s: from the first step to the last checkpoint. peak: what utilisation is held against, as text.
    """
    output, layout = config.output, stack.machinery.layout
    first, applied, last = history.first, history.last_applied, history.last
    typical = {name: known for name in TYPICAL if (known := history.typical(name)) is not None}
    assert first is not None and applied is not None and last is not None, "a run without such a step fails"
    return RunSummary(
        schedule=config.schedule.name,
        dispatch=config.moe.dispatch,
        steps=last.step,
        first_loss=first.loss,
        last_loss=applied.loss,
        eval_loss=last.eval_loss,
        eval_noise=last.eval_noise,
        unit=source.corpora[0].text.unit.removesuffix("s"),
        unigram_entropy=source.unigram_entropy_nats,
        tokens_per_s=typical["tokens_per_s"],
        whole_tokens_per_s=history.tokens / whole_s,
        model_flops_utilisation=typical.get("model_flops_utilisation"),
        peak_flops=peak,
        iteration_s_median=typical["iteration_s"],
        overlap_efficiency=analysis.overlap_efficiency,
        exposed_communication_s=typical["exposed_communication_s"],
        communication_s=typical["communication_s"],
        processes=layout.world_size,
        tp_size=layout.tp_size,
        etp_size=layout.etp_size,
        num_experts=config.moe.num_experts,
        num_local_experts=ExpertPlacement.even(config.moe.num_experts, layout.ep_size).slots,
        parameters=total_parameters(stack),
        corpus=source.words,
        checkpoint=_if_there(checkpoint),
        metrics=str(output.dir / METRICS_FILE),
        trace=str(output.dir / "trace.json") if output.trace_steps else None,
        tensorboard=_if_there(output.dir / TENSORBOARD_FOLDER) if output.tensorboard else None,
        simulated_iteration_s=analysis.simulated_s,
        interrupted=last.step < config.train.steps,
        plan=_if_there(output.dir / PLAN_FILE) if config.plan.is_saved else None,
        cluster=_if_there(output.dir / CLUSTER_FILE) if config.plan.is_saved else None,
        skipped_steps=history.skipped,
        rank_load_max_over_mean=typical.get("rank_rows_max_over_mean"),
        rows_crossing_nodes=typical.get("rows_crossing_nodes"),
        loads_in_common=typical.get("loads_in_common"),
        loads=_if_there(loads),
        stragglers=analysis.stragglers,
    )


def _if_there(path: Path | None) -> str | None:
    return str(path) if path is not None and path.exists() else None


def total_parameters(stack: PipelinedStack) -> int:
    """Return the number of parameters of the whole model, every expert counted once."""
    model, assigned = stack.model, assign(stack.parts, stack.model)
    parts = {id(model.get_parameter(name)): cut.count for name, cut in shardings_of(model).items()}
    replicated, local = (
        sum(parameter.numel() * parts.get(id(parameter), 1) for layer in layers for parameter in layer)
        for layers in (assigned.replicated, assigned.experts)
    )
    return replicated + local * stack.machinery.layout.ep_size
