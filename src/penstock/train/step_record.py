"""Records the last step of a run beside its prediction, for the run's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from penstock.graph import Task
from penstock.mesh import Mesh, Seconds
from penstock.runtime import PipelinedStack
from penstock.simulate import Timeline
from penstock.trace import TaskRecord
from penstock.trace.critical import Link, critical_path
from penstock.trace.step_file import MOST_SHOWN, PathLink, Spans, StepFile
from penstock.trace.stragglers import Straggler
from penstock.train.pilot import Forecast
from penstock.train.tracing import StepAnalysis, slowest_s, span_s

DIGITS = 7
"""Decimal places of seconds: a tenth of a microsecond."""


@dataclass(frozen=True)
class _OfRank:
    """What one rank contributes. typical_s: by task of the graph. spans_s: of every step."""

    last: list[TaskRecord]
    typical_s: list[float]
    spans_s: list[float]


def keep_step(
    stack: PipelinedStack,
    steps: Sequence[Sequence[TaskRecord]],
    analysis: StepAnalysis,
    slow: tuple[Straggler, ...],
    forecast: Callable[[], Forecast],
    folder: Path,
    writing: Callable[[], AbstractContextManager[None]],
) -> None:
    """Write, on rank 0, `step.json` into `folder`; all ranks call it.

    steps: this rank's records of the last steps under the plan in use. slow: ranks that computed slowly in
    them. forecast: asked by rank 0 alone.
    writing: as in `analyse`.
    """
    control, plan = stack.machinery.control, stack.plan
    tasks = list(plan.graph.tasks)
    everyone = control.gather(_of_rank(tasks, steps), "keeping the last step")
    if control.rank == 0:
        known = _Known(tasks, stack.machinery.layout.mesh, everyone, forecast())
        path = critical_path((r for each in everyone for r in each.last), plan.graph.needs, known.mesh)
        with writing():
            replace(known.file(path, analysis), stragglers=slow).save(folder)
    control.barrier("waiting for the last step's file")


def _of_rank(tasks: Sequence[Task], steps: Sequence[Sequence[TaskRecord]]) -> _OfRank:
    seconds: dict[Task, list[float]] = {task: [] for task in tasks}
    for step in steps:
        for record in step:
            seconds[record.task].append(record.duration_s)
    return _OfRank(
        last=list(steps[-1]),
        typical_s=[median(seconds[task]) for task in tasks],
        spans_s=[span_s(step) for step in steps],
    )


@dataclass(frozen=True)
class _Known:
    """What rank 0 writes into the file."""

    tasks: Sequence[Task]
    mesh: Mesh
    everyone: Sequence[_OfRank]
    forecast: Forecast

    def file(self, path: Sequence[Link], analysis: StepAnalysis) -> StepFile:
        timeline, spans_s = self.forecast.timeline, [each.spans_s for each in self.everyone]
        shown = self._shown(path)
        return StepFile(
            step=self.everyone[0].last[0].step,
            ranks=self.mesh.world_size,
            shown=shown,
            source=self.forecast.source,
            predicted_s=timeline.iteration_s,
            measured_s=slowest_s(spans_s),
            bound_s=analysis.bound_s,
            traced_s=analysis.measured_s,
            traced_steps=analysis.steps,
            typical_steps=len(spans_s[0]),
            tasks=tuple(map(str, self.tasks)),
            lanes=tuple(str(task.lane) for task in self.tasks),
            predicted=self._predicted(timeline, shown),
            measured=self._measured(shown),
            typical_predicted_s=tuple(
                self._typical(task, timeline.times[task].end - timeline.times[task].start)
                for task in self.tasks
            ),
            typical_measured_s=tuple(
                self._typical(task, np.array(durations_s))
                for task, durations_s in zip(
                    self.tasks, zip(*(each.typical_s for each in self.everyone), strict=True), strict=True
                )
            ),
            path=tuple(map(_link, path)),
        )

    def _shown(self, path: Sequence[Link]) -> tuple[int, ...]:
        """Return the ranks to show: all, or of many, rank 0 and those that the critical path passes most."""
        ranks = range(self.mesh.world_size)
        if len(ranks) <= MOST_SHOWN:
            return tuple(ranks)
        passed = Counter(link.rank for link in path)
        first = sorted(ranks, key=lambda rank: (rank > 0, -passed[rank], rank))
        return tuple(sorted(first[:MOST_SHOWN]))

    def _predicted(self, timeline: Timeline, shown: Sequence[int]) -> Spans:
        spans = [timeline.times[task] for task in self.tasks]
        return Spans(
            start_s=tuple(tuple(_rounded(span.start[rank]) for span in spans) for rank in shown),
            end_s=tuple(tuple(_rounded(span.end[rank]) for span in spans) for rank in shown),
        )

    def _measured(self, shown: Sequence[int]) -> Spans:
        found = [{record.task: record for record in self.everyone[rank].last} for rank in shown]
        return Spans(
            start_s=tuple(tuple(_rounded(each[task].start_s) for task in self.tasks) for each in found),
            end_s=tuple(tuple(_rounded(each[task].end_s) for task in self.tasks) for each in found),
        )

    def _typical(self, task: Task, durations_s: Seconds) -> float:
        """Return a task's typical duration over ranks: the mean; the shortest where ranks wait for one."""
        return _rounded(durations_s.min() if task.axes else durations_s.mean())


def _link(link: Link) -> PathLink:
    return PathLink(
        task=str(link.task),
        lane=str(link.task.lane),
        rank=link.rank,
        start_s=_rounded(link.start_s),
        end_s=_rounded(link.end_s),
        gap_s=_rounded(link.gap_s),
    )


def _rounded(seconds: float) -> float:
    """Return rounded seconds, at least 0: a clock may put a moment just before the beginning of the step."""
    return round(max(0.0, float(seconds)), DIGITS)
