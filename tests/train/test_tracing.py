"""The last steps of a run beside what the simulator says of the same tasks."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph import Lane
from penstock.runtime import PipelinedStack
from penstock.timing import simulate
from penstock.trace import TaskRecord
from penstock.trace.step_file import StepFile
from penstock.train.history import StepAnalysis, analyse, span_s
from penstock.train.pilot import Forecast
from tests.steps import PLAIN
from tests.support.layouts import tiny_case
from tests.support.parity import Case, own_batch, stack_of
from tests.support.ranks import Pools

NAMES = sorted(PLAIN)


def case_of(schedule: str, world_size: int) -> Case:
    return tiny_case(world_size, schedule, chunks=2, all_reduce_chunk_bytes=2048, ep_size=None)


def analysed(rank: int, case: Case, steps: int, folder: Path) -> StepAnalysis:
    """Some steps under one plan, analysed."""
    stack = stack_of(rank, case)
    kept = trained(stack, rank, case, steps)
    return analyse(stack, kept, steps, lambda: forecast(stack), folder)


def forecast(stack: PipelinedStack) -> Forecast:
    plan, mesh = stack.plan, stack.machinery.layout.mesh
    return Forecast("nothing", simulate(plan.schedule, plan.graph, lambda task: 1e-3, mesh))


def trained(stack: PipelinedStack, rank: int, case: Case, steps: int) -> list[list[TaskRecord]]:
    """Records of some steps under one plan."""
    kept: list[list[TaskRecord]] = []
    for step in range(1, steps + 1):
        stack(*own_batch(rank, case)).backward()
        stack.zero_grad()
        stack.machinery.control.barrier("ending the step")
        kept.append(stack.records(step))
    return kept


def orders(folder: Path) -> dict[tuple[str, int, int], list[str]]:
    """Names of tasks in order of their start, by row of the trace, lane and step."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        found[titles[event["pid"]], event["tid"], event["args"]["step"]].append(event["name"])
    return found


@pytest.mark.every_value
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_measured_order_is_the_simulated_one(
    ranks: Pools, tmp_path: Path, schedule: str, world_size: int
) -> None:
    case = case_of(schedule, world_size)
    results = ranks(world_size).run(analysed, case, 3, tmp_path)
    assert all(result == results[0] for result in results)
    found = orders(tmp_path)
    for rank in range(world_size):
        for number, lane in enumerate(Lane):
            simulated = found[f"simulated rank {rank}", number, 0]
            for step in (1, 2, 3):
                assert found[f"measured rank {rank}", number, step] == simulated, (rank, lane, step)
        assert found[f"simulated rank {rank}", list(Lane).index(Lane.COMPUTE), 0]


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("steps", [1, 2])
def test_no_order_beats_the_bound(tmp_path: Path, schedule: str, steps: int) -> None:
    analysis = analysed(0, case_of(schedule, 1), steps, tmp_path)
    assert 0 < analysis.bound_s <= analysis.simulated_s * (1 + 1e-9)
    assert analysis.measured_s > 0
    assert analysis.overlap_efficiency == analysis.bound_s / analysis.measured_s


def test_steps_lie_one_after_another(tmp_path: Path) -> None:
    analysed(0, case_of("penstock", 1), 3, tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["args"]["step"]:
            spans[event["args"]["step"]] += [event["ts"], event["ts"] + event["dur"]]
    assert sorted(spans) == [1, 2, 3]
    # To the rounding of a microsecond in the file.
    assert max(spans[1]) <= min(spans[2]) + 1
    assert max(spans[2]) <= min(spans[3]) + 1


def test_a_disturbed_step_among_the_traced_ones_does_not_make_the_measured_step(tmp_path: Path) -> None:
    case = case_of("sequential", 1)
    stack = stack_of(0, case)
    kept = trained(stack, 0, case, 3)
    late_s = 1 + max(record.end_s for step in kept for record in step)
    kept[2] = [replace(record, end_s=record.end_s + late_s) for record in kept[2]]
    analyse(stack, kept, 2, lambda: forecast(stack), tmp_path)
    file = StepFile.read(tmp_path / "step.json")
    assert (file.first_step, file.step, file.typical_steps, file.traced_steps) == (1, 3, 3, 2)
    assert not file.apart
    assert file.measured_s == max(map(span_s, kept[:2]))
    assert file.traced_s == sum(map(span_s, kept[1:])) / 2 > late_s / 2
    assert file.efficiency == file.bound_s / (file.traced_s or 0)
