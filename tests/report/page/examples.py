"""A run as a report sees it, made without training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.mesh import Mesh
from penstock.report.loads import LoadCourse
from penstock.report.page.findings import Course, FinishedRun
from penstock.timing import simulate
from penstock.trace.analysis import critical_path
from penstock.trace.step_file import PathLink, Spans, StepFile
from tests.steps import example_plan, random_seconds

STEPS, LAYERS, EXPERTS = 30, 2, 4


def step_file(ranks: int = 2) -> StepFile:
    """Of simulated steps: what is measured has other durations than what is predicted."""
    plan = example_plan("flowmoe")
    mesh = Mesh(world_size=ranks, ep_size=ranks)
    runs = [
        simulate(plan.schedule, plan.graph, random_seconds(plan.graph, seed).__getitem__, mesh)
        for seed in (1, 2)
    ]
    tasks = list(plan.graph.tasks)
    spans = [
        Spans(
            start_s=tuple(
                tuple(float(run.times[task].start[rank]) for task in tasks) for rank in range(ranks)
            ),
            end_s=tuple(tuple(float(run.times[task].end[rank]) for task in tasks) for rank in range(ranks)),
        )
        for run in runs
    ]
    path = critical_path(runs[1].records(), plan.graph.needs, mesh)
    typical = [
        tuple(float(run.times[task].end[0] - run.times[task].start[0]) for task in tasks) for run in runs
    ]
    return StepFile(
        step=STEPS,
        ranks=ranks,
        shown=tuple(range(ranks)),
        source="numbers drawn by chance",
        predicted_s=runs[0].iteration_s,
        measured_s=runs[1].iteration_s,
        bound_s=0.9 * runs[1].iteration_s,
        typical_steps=10,
        tasks=tuple(map(str, tasks)),
        lanes=tuple(str(task.lane) for task in tasks),
        predicted=spans[0],
        measured=spans[1],
        typical_predicted_s=typical[0],
        typical_measured_s=typical[1],
        path=tuple(
            PathLink(
                task=str(link.task),
                lane=str(link.task.lane),
                rank=link.rank,
                start_s=link.start_s,
                end_s=link.end_s,
                gap_s=link.gap_s,
            )
            for link in path
        ),
    )


def course() -> Course:
    """Losses that fall, with a step that was not finite, an evaluation, and two plans."""
    numbers = tuple(range(1, STEPS + 1))
    falling = tuple(None if step == 3 else 5.0 / step for step in numbers)
    steady = tuple(0.1 + 0.001 * (step % 4) for step in numbers)
    return Course(
        step=numbers,
        loss=falling,
        eval_loss=tuple(2.5 if step == 20 else None for step in numbers),
        eval_noise=tuple(None for _ in numbers),
        tokens_per_s=tuple(1000.0 / each for each in steady),
        iteration_s=steady,
        communication_s=tuple(each / 2 for each in steady),
        exposed_communication_s=tuple(each / 8 for each in steady),
        model_flops_utilisation=tuple(0.4 for _ in numbers),
        peak_memory_bytes=tuple(2**30 for _ in numbers),
        plan=tuple("first" if step < 10 else "second" for step in numbers),
        skipped=tuple(step == 3 for step in numbers),
        resumed=tuple(False for _ in numbers),
        aux_loss_by_layer=tuple((1.0, 1.1) for _ in numbers),
        rows_dropped=tuple((0.0, 0.05) for _ in numbers),
        rank_rows_max_over_mean=tuple((1.5, 1.25) for _ in numbers),
        loads_in_common=(None, *((0.75, 0.875) for _ in numbers[1:])),
    )


def loads() -> LoadCourse:
    drawn = np.random.default_rng(0).integers(1, 50, (STEPS, LAYERS, EXPERTS))
    return LoadCourse((1, 3), tuple(range(1, STEPS + 1)), drawn)


def finished(**changed: object) -> FinishedRun:
    """A run with all but plan and summary."""
    run = FinishedRun(
        name="runs/example", course=course(), settings="[model]\n", step=step_file(), loads=loads()
    )
    return replace(run, **changed)  # type: ignore[arg-type]  # as the caller says
