"""The trace of a run: measured tasks of all ranks, below them what the simulator says of the same tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.cost import MeasuredCost
from penstock.runtime import PipelinedStack
from penstock.simulate import Ranks, simulate
from penstock.trace import TaskRecord, write_chrome_trace


def write_trace(path: Path, stack: PipelinedStack, steps: Sequence[Sequence[TaskRecord]]) -> float:
    """Write the trace (rank 0) of some steps of all ranks; returns the simulated iteration in seconds.

    steps: this rank's records, step by step, all under the plan in use now. The simulation uses their
    median durations, so the two pictures differ where waiting differs and not where work does.
    """
    control, layout, plan = stack.machinery.control, stack.machinery.layout, stack.plan
    everyone = control.gather([list(records) for records in steps], "collecting the trace")
    measured = [r for number in range(len(steps)) for rank in everyone for r in rank[number]]
    cost = MeasuredCost.from_records(measured, _never_measured)
    ranks = Ranks(layout.world_size, layout.ep_size)
    timeline = simulate(plan.schedule, plan.graph, cost, ranks)
    if control.rank == 0:
        runs = {"measured": _one_after_another(everyone), "simulated": timeline.records()}
        write_chrome_trace(path, runs)
    control.barrier("waiting for the trace")
    return timeline.iteration_s


def _one_after_another(everyone: Sequence[Sequence[Sequence[TaskRecord]]]) -> list[TaskRecord]:
    """Steps side by side in time. Every rank's clock starts with its own step, behind a common barrier."""
    shifted: list[TaskRecord] = []
    offset_s = 0.0
    for number in range(len(everyone[0])):
        records = [record for rank in everyone for record in rank[number]]
        shifted += [replace(r, start_s=r.start_s + offset_s, end_s=r.end_s + offset_s) for r in records]
        offset_s = max(record.end_s for record in shifted)
    return shifted


def _never_measured(task: object) -> float:
    raise AssertionError(f"{task} did not run in a step that ran every task")
