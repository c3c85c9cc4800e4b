"""Analyses the last steps: the trace, predicted against measured, how near the lower bound they came.

All ranks exchange what they have once; rank 0 writes the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from penstock.cost import MeasuredCost
from penstock.graph import Task
from penstock.mesh import Mesh, Seconds
from penstock.runtime import PipelinedStack
from penstock.timing import lower_bound, simulate
from penstock.trace import TaskRecord, compare, write_chrome_trace, write_comparison
from penstock.trace.analysis import Kind, Link, Straggler, critical_path, stragglers, typical_seconds
from penstock.trace.step_file import MOST_SHOWN, PathLink, Spans, StepFile
from penstock.train.pilot import Forecast

DIGITS = 7
"""Decimal places of seconds: a tenth of a microsecond."""


@dataclass(frozen=True, kw_only=True)
class StepAnalysis:
    """Analysis of the last steps of all ranks. Seconds.

    steps: number of those that were traced. measured_s: the median of these on the slowest rank, from its
    first task to its last. simulated_s: the simulated time of the same tasks with their median durations.
    bound_s: what no order of these tasks can beat, the busiest lane or the critical path. A collective counts
    with its shortest duration over ranks: the rest is waiting for each other. stragglers: ranks that computed
    slowly.
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
    """What one rank contributes. traced: the last of its steps. typical_s: by task of the graph. spans_s: of
    every step. kinds_s: see `typical_seconds`."""

    traced: list[Sequence[TaskRecord]]
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
        return _OfRank(list(steps[-traced:]), typical_s, list(map(span_s, steps)), typical_seconds(records))


def analyse(
    stack: PipelinedStack,
    steps: Sequence[Sequence[TaskRecord]],
    traced: int,
    forecast: Callable[[], Forecast],
    folder: Path,
    *,
    traces: bool = True,
    writing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepAnalysis:
    """Compare this run's last steps with the simulator; all ranks call it and get the same result.

    Rank 0 writes `step.json`; if it `traces`, also `trace.json` (all ranks, measured, below that simulated)
    and `tasks.csv` (its own last step, task by task, predicted and measured).

    Args:
        steps: This rank's records, step by step, all under the plan in use now.
        traced: How many of them, the last ones, are compared task by task.
        forecast: Returns what was expected of a step; asked by rank 0 alone.
        writing: A context around the writing, which handles an OSError.
    """
    control, plan, mesh = stack.machinery.control, stack.plan, stack.machinery.layout.mesh
    tasks = list(plan.graph.tasks)
    everyone = control.gather(_OfRank.of(tasks, steps, traced), "collecting the last steps")
    records = [record for rank in everyone for step in rank.traced for record in step]
    cost = MeasuredCost.from_records(records, _never_measured)
    timeline = simulate(plan.schedule, plan.graph, cost.on_ranks, mesh)
    found = StepAnalysis(
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
                mine = [record for record in timeline.records() if record.rank == 0]
                write_comparison(folder / "tasks.csv", compare(mine, everyone[0].traced[-1]))
            links = critical_path(last, plan.graph.needs, mesh)
            _step_file(tasks, mesh, everyone, expected, links, found).save(folder)
    control.barrier("waiting for the files of the last steps")
    return found


def _step_file(
    tasks: Sequence[Task],
    mesh: Mesh,
    everyone: Sequence[_OfRank],
    forecast: Forecast,
    links: Sequence[Link],
    analysis: StepAnalysis,
) -> StepFile:
    """Return what is kept of the last step beside its prediction. links: of the critical path."""
    # Shown are all ranks, or of many rank 0 and those that the critical path passes most.
    passed = Counter(link.rank for link in links)
    first = sorted(range(mesh.world_size), key=lambda rank: (rank > 0, -passed[rank], rank))
    times, shown = [forecast.timeline.times[task] for task in tasks], tuple(sorted(first[:MOST_SHOWN]))
    last = [{record.task: record for record in everyone[rank].traced[-1]} for rank in shown]
    measured_s = zip(*(each.typical_s for each in everyone), strict=True)
    return StepFile(
        step=everyone[0].traced[-1][0].step,
        ranks=mesh.world_size,
        shown=shown,
        source=forecast.source,
        predicted_s=forecast.timeline.iteration_s,
        measured_s=_slowest_s([each.spans_s for each in everyone]),
        bound_s=analysis.bound_s,
        traced_s=analysis.measured_s,
        traced_steps=analysis.steps,
        typical_steps=len(everyone[0].spans_s),
        tasks=tuple(map(str, tasks)),
        lanes=tuple(str(task.lane) for task in tasks),
        predicted=Spans(
            start_s=tuple(tuple(_rounded(span.start[rank]) for span in times) for rank in shown),
            end_s=tuple(tuple(_rounded(span.end[rank]) for span in times) for rank in shown),
        ),
        measured=Spans(
            start_s=tuple(tuple(_rounded(each[task].start_s) for task in tasks) for each in last),
            end_s=tuple(tuple(_rounded(each[task].end_s) for task in tasks) for each in last),
        ),
        typical_predicted_s=tuple(
            _typical(task, span.end - span.start) for task, span in zip(tasks, times, strict=True)
        ),
        typical_measured_s=tuple(
            _typical(task, np.array(each)) for task, each in zip(tasks, measured_s, strict=True)
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


def _typical(task: Task, durations_s: Seconds) -> float:
    """Return a task's typical duration over ranks: the mean; the shortest where ranks wait for one."""
    return _rounded(durations_s.min() if task.axes else durations_s.mean())


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
