"""What is kept of the steps of a run, however long it is, and the summary and the pictures made of that.

The last steps are analysed: the trace, predicted against measured, how near the lower bound they came. All
ranks exchange what they have of them once; rank 0 writes the files.
Shapes: Y MoE layers, E experts.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Final

import numpy as np

from penstock.apportion import Counts
from penstock.config import UNSET, ConfigError
from penstock.cost import MeasuredCost
from penstock.graph import Task
from penstock.mesh import Mesh, Seconds
from penstock.placement import ExpertPlacement
from penstock.report import RunSummary
from penstock.report.loads import NUMBERS, REMOVE, LoadCourse
from penstock.report.summary import WARM_UP_STEPS
from penstock.runtime import PipelinedStack
from penstock.runtime.gradients import assign
from penstock.sharding import shardings_of
from penstock.timing import lower_bound, simulate
from penstock.trace import TaskRecord, compare, write_chrome_trace, write_comparison
from penstock.trace.analysis import Kind, Link, Straggler, critical_path, stragglers, typical_seconds
from penstock.trace.step_file import MOST_SHOWN, PathLink, Spans, StepFile
from penstock.train.batches import Source
from penstock.train.config import RunConfig
from penstock.train.metrics import METRICS_FILE, TENSORBOARD_FOLDER, StepMetrics
from penstock.train.output import CLUSTER_FILE, PLAN_FILE
from penstock.train.pilot import Forecast

DIGITS = 7
"""Decimal places of seconds: a tenth of a microsecond."""


@dataclass(frozen=True, kw_only=True)
class StepAnalysis:
    """Analysis of the last steps of all ranks.

    Attributes:
        steps: Number of steps that were analysed.
        measured_s: Their median duration on the slowest rank, from its first task to its last.
        simulated_s: Simulated duration of a step of the same tasks with their median durations.
        bound_s: Seconds that no order of these tasks can beat: the busiest lane or the critical path. A
            collective counts with its shortest duration in a group: the rest is waiting for each other.
        stragglers: Ranks that computed slowly.
    """

    steps: int
    measured_s: float
    simulated_s: float
    bound_s: float
    stragglers: tuple[Straggler, ...]

    @property
    def overlap_efficiency(self) -> float:
        """Lower bound over measured time; at 1.0 no order of these tasks could be faster."""
        return self.bound_s / self.measured_s


@dataclass(frozen=True)
class _OfRank:
    """What one rank contributes. traced: the last of its steps. first_step: number of the first. typical_s:
    by task of the graph. spans_s: of every step. kinds_s: see `typical_seconds`."""

    traced: list[Sequence[TaskRecord]]
    first_step: int
    typical_s: list[float]
    spans_s: list[float]
    kinds_s: Mapping[Kind, float]

    @staticmethod
    def of(tasks: Sequence[Task], steps: Sequence[Sequence[TaskRecord]], traced: int) -> _OfRank:
        seconds: dict[Task, list[float]] = {task: [] for task in tasks}
        records = [record for step in steps for record in step]
        for record in records:
            seconds[record.task].append(record.duration_s)
        typical_s = [median(seconds[task]) for task in tasks]
        spans_s, first_step = list(map(span_s, steps)), steps[0][0].step
        return _OfRank(list(steps[-traced:]), first_step, typical_s, spans_s, typical_seconds(records))


def analyse(
    stack: PipelinedStack,
    steps: Sequence[Sequence[TaskRecord]],
    traced: int,
    forecast: Callable[[], Forecast | None],
    folder: Path,
    *,
    traces: bool = True,
    writing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepAnalysis:
    """Compare this run's last steps with the simulator; all ranks call it and get the same result.

    Args:
        steps: This rank's records, step by step, all under the plan in use now.
        traced: How many of them, the last ones, are compared task by task.
        forecast: Returns what was expected of a step, if that is known; called by rank 0 alone.
        folder: Where rank 0 writes `step.json`.
        traces: Whether it also writes `trace.json` (all ranks, measured, below that simulated) and
            `tasks.csv` (its own last step, task by task, predicted and measured).
        writing: Makes the context in which files are written, which handles an OSError.
    """
    control, plan, layout = stack.machinery.control, stack.plan, stack.machinery.layout
    mesh = layout.mesh
    tasks = list(plan.graph.tasks)
    everyone = control.gather(_OfRank.of(tasks, steps, traced), "collecting the last steps")
    records = [record for rank in everyone for step in rank.traced for record in step]
    cost = MeasuredCost.from_records(records, _never_measured, mesh)
    timeline = simulate(plan.schedule, plan.graph, cost.on_ranks, mesh)
    analysis = StepAnalysis(
        steps=min(traced, len(steps)),
        measured_s=_slowest_s([list(map(span_s, rank.traced)) for rank in everyone]),
        simulated_s=timeline.iteration_s,
        bound_s=lower_bound(plan.graph, cost.on_ranks, mesh).seconds,
        stragglers=stragglers([each.kinds_s for each in everyone]),
    )
    if control.rank == 0:
        expected, last = forecast(), [record for each in everyone for record in each.traced[-1]]
        with writing():
            if traces:
                # One after another in time: clocks start with every step, which starts after a vote.
                shifted: list[TaskRecord] = []
                offset_s = 0.0
                for ranks in zip(*(each.traced for each in everyone), strict=True):
                    records = [record for rank in ranks for record in rank]
                    shifted += [
                        replace(r, start_s=r.start_s + offset_s, end_s=r.end_s + offset_s) for r in records
                    ]
                    offset_s = max(record.end_s for record in shifted)
                runs = {"measured": shifted, "simulated": timeline.records()}
                write_chrome_trace(folder / "trace.json", runs)
                simulated = [record for record in timeline.records() if record.rank == 0]
                write_comparison(folder / "tasks.csv", compare(simulated, everyone[0].traced[-1]))
            links = critical_path(last, plan.graph.needs, mesh)
            file = _step_file(tasks, mesh, everyone, expected, links, analysis)
            replace(file, nodes=layout.nodes).save(folder)
    control.barrier("waiting for the files of the last steps")
    return analysis


def _step_file(
    tasks: Sequence[Task],
    mesh: Mesh,
    everyone: Sequence[_OfRank],
    forecast: Forecast | None,
    links: Sequence[Link],
    analysis: StepAnalysis,
) -> StepFile:
    """Return what is kept of the last step, beside its prediction; links: of the critical path."""
    # Shown are all ranks, or of many rank 0 and those that the critical path passes most.
    passed = Counter(link.rank for link in links)
    first = sorted(range(mesh.world_size), key=lambda rank: (rank > 0, -passed[rank], rank))
    shown = tuple(sorted(first[:MOST_SHOWN]))
    last = [{record.task: record for record in everyone[rank].traced[-1]} for rank in shown]
    measured_s = zip(*(each.typical_s for each in everyone), strict=True)
    file = StepFile(
        step=everyone[0].traced[-1][0].step,
        ranks=mesh.world_size,
        shown=shown,
        measured_s=_slowest_s([each.spans_s for each in everyone]),
        bound_s=analysis.bound_s,
        traced_s=analysis.measured_s,
        traced_steps=analysis.steps,
        typical_steps=len(everyone[0].spans_s),
        first_step=everyone[0].first_step,
        tasks=tuple(map(str, tasks)),
        lanes=tuple(str(task.lane) for task in tasks),
        measured=_spans([[(each[task].start_s, each[task].end_s) for task in tasks] for each in last]),
        typical_measured_s=tuple(
            _typical(task, np.array(each), mesh) for task, each in zip(tasks, measured_s, strict=True)
        ),
        path=tuple(
            PathLink(
                task=str(link.task),
                lane=str(link.task.lane),
                rank=link.rank,
                start_s=_rounded(link.start_s),
                end_s=_rounded(link.end_s),
                gap_s=_rounded(link.gap_s),
            )
            for link in links
        ),
        stragglers=analysis.stragglers,
    )
    if forecast is None:
        return file
    timeline = forecast.timeline
    times = [timeline.times[task] for task in tasks]
    return replace(
        file,
        source=forecast.source,
        predicted_s=timeline.iteration_s,
        predicted=_spans([[(span.start[rank], span.end[rank]) for span in times] for rank in shown]),
        typical_predicted_s=tuple(
            _typical(task, span.end - span.start, timeline.mesh)
            for task, span in zip(tasks, times, strict=True)
        ),
    )


def _spans(times_s: Sequence[Sequence[tuple[float, float]]]) -> Spans:
    """Return start and end of every task, by rank."""
    start_s, end_s = (tuple(tuple(_rounded(each[i]) for each in rank) for rank in times_s) for i in (0, 1))
    return Spans(start_s=start_s, end_s=end_s)


def _typical(task: Task, durations_s: Seconds, mesh: Mesh) -> float:
    """Return a task's typical duration over ranks: the mean; where ranks wait for one, what that one saw."""
    seen_s = durations_s[mesh.last_to_come(durations_s, task.axes)] if task.axes else durations_s.mean()
    return _rounded(seen_s)


def _rounded(seconds: float) -> float:
    """Return rounded seconds, at least 0: a clock may put a moment just before the beginning of the step."""
    return round(max(0.0, float(seconds)), DIGITS)


def _slowest_s(spans_s: Sequence[Sequence[float]]) -> float:
    """Return the median step of the slowest rank. spans_s: by rank, of every step."""
    return float(median(map(max, zip(*spans_s, strict=True))))


def span_s(records: Sequence[TaskRecord]) -> float:
    """Return the seconds from the first task of a step to the end of its last."""
    return max(r.end_s for r in records) - min(r.start_s for r in records)


def _never_measured(task: object) -> float:
    raise AssertionError(f"{task} did not run in a step that ran every task")


MOST_KEPT: Final = 256

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

    Attributes:
        first, last_applied: The first and the last step that was not skipped; None as long as there is none.
        last: The last step; None as long as there is none.
        skipped: Number of skipped steps.
        tokens: Number of tokens in all steps.
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
        values = [value for value in column[WARM_UP_STEPS:] or column if not math.isnan(value)]
        return median(values) if values else None


@dataclass
class LoadBook:
    """Loads over a run, of every step at first; beyond MOST_KEPT steps every other one is dropped."""

    _steps: list[int] = field(default_factory=list)
    _loads: list[Counts] = field(default_factory=list)
    _every: int = 1

    def add(self, step: int, loads_YE: Counts) -> None:
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
    def resumed(folder: Path, done: int, layers: Sequence[int], experts: int) -> LoadBook:
        """Return what an earlier start kept of steps up to `done`.

        Args:
            layers: Numbers of the MoE layers.
            experts: Number of experts of each.

        Raises:
            ConfigError: If its file is damaged, or of another model.
        """
        book, path = LoadBook(), folder / NUMBERS
        if done and path.exists():
            course = LoadCourse.read(path)
            if (course.layers, course.loads_SYE.shape[-1]) != (tuple(layers), experts):
                raise ConfigError(str(path), UNSET, "holds the loads of another model", REMOVE)
            if len(course.steps) > 1:  # it goes on as it was thinned
                book._every = min(later - step for step, later in pairwise(course.steps))
            for step, loads_YE in zip(course.steps, course.loads_SYE, strict=True):
                if step <= done:
                    book.add(step, loads_YE)
        return book

    def course(self, layers: Sequence[int]) -> LoadCourse | None:
        """Return what is drawn; None where no loads are known.

        Args:
            layers: Numbers of the MoE layers.
        """
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

    Args:
        checkpoint: The last checkpoint, if there is one.
        loads: The picture of loads, if there is one.
        whole_s: Seconds from the first step to the last checkpoint.
        peak: In words, the peak of the devices to which utilisation refers; None if it is unknown.
    """
    output, layout = config.output, stack.machinery.layout
    first, applied, last = history.first, history.last_applied, history.last
    typical = {name: value for name in TYPICAL if (value := history.typical(name)) is not None}
    assert first is not None and applied is not None and last is not None, "a run without such a step fails"
    return RunSummary(
        schedule=config.schedule.name,
        dispatch=config.moe.dispatch,
        steps=last.step,
        first_step=first.step,
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
