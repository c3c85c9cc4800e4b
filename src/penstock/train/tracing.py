"""Analyses the last steps: the trace, predicted against measured, and how near the lower bound they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from penstock.cost import MeasuredCost
from penstock.runtime import PipelinedStack
from penstock.simulate import Timeline, lower_bound, simulate
from penstock.trace import TaskRecord, compare, write_chrome_trace, write_comparison

Steps = list[list[TaskRecord]]


@dataclass(frozen=True, kw_only=True)
class StepAnalysis:
    """Analysis of the traced steps of all ranks. Seconds.

    steps: their number. measured_s: the median step of the slowest rank, from its first task to its last.
    simulated_s: the simulated time of the same tasks with their median durations. bound_s: what no order of
    these tasks can beat, the busiest lane or the critical path. A collective counts with its shortest
    duration over ranks: the rest is waiting for each other.
    """

    steps: int
    measured_s: float
    simulated_s: float
    bound_s: float

    @property
    def overlap_efficiency(self) -> float:
        """Lower bound over measured time; at 1.0 no order of these tasks could be faster."""
        return self.bound_s / self.measured_s


def analyse(
    stack: PipelinedStack,
    steps: Sequence[Sequence[TaskRecord]],
    folder: Path | None,
    writing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepAnalysis:
    """Compare this run's last steps with the simulator; all ranks call it and get the same result.

    steps: this rank's records, step by step, all under the plan in use now. With a folder, rank 0 writes
    `trace.json` (all ranks, measured and below that simulated) and `tasks.csv` (its own last step, task by
    task, predicted and measured). writing: a context around the writing, which handles an OSError.
    """
    control, layout, plan = stack.machinery.control, stack.machinery.layout, stack.plan
    everyone = control.gather([list(records) for records in steps], "collecting the trace")
    cost = MeasuredCost.from_records([r for rank in everyone for step in rank for r in step], _never_measured)
    ranks = layout.mesh
    timeline = simulate(plan.schedule, plan.graph, cost.on_ranks, ranks)
    if folder is not None and control.rank == 0:
        with writing():
            _write(folder, everyone, timeline)
    control.barrier("waiting for the trace")
    return StepAnalysis(
        steps=len(steps),
        measured_s=slowest_s([[span_s(step) for step in rank] for rank in everyone]),
        simulated_s=timeline.iteration_s,
        bound_s=lower_bound(plan.graph, cost.on_ranks, ranks).seconds,
    )


def _write(folder: Path, everyone: Sequence[Steps], timeline: Timeline) -> None:
    runs = {"measured": _one_after_another(everyone), "simulated": timeline.records()}
    write_chrome_trace(folder / "trace.json", runs)
    mine = [record for record in timeline.records() if record.rank == 0]
    write_comparison(folder / "tasks.csv", compare(mine, everyone[0][-1]))


def _one_after_another(everyone: Sequence[Steps]) -> list[TaskRecord]:
    """Return all steps one after another in time: clocks start with every step, which starts after a vote."""
    shifted: list[TaskRecord] = []
    offset_s = 0.0
    for number in range(len(everyone[0])):
        records = [record for rank in everyone for record in rank[number]]
        shifted += [replace(r, start_s=r.start_s + offset_s, end_s=r.end_s + offset_s) for r in records]
        offset_s = max(record.end_s for record in shifted)
    return shifted


def slowest_s(spans_s: Sequence[Sequence[float]]) -> float:
    """Return the median step of the slowest rank. spans_s: by rank, of every step."""
    slowest: list[float] = [max(step) for step in zip(*spans_s, strict=True)]
    return median(slowest)


def span_s(records: Sequence[TaskRecord]) -> float:
    """Return the seconds from the first task of a step to the end of its last."""
    return max(r.end_s for r in records) - min(r.start_s for r in records)


def _never_measured(task: object) -> float:
    raise AssertionError(f"{task} did not run in a step that ran every task")
