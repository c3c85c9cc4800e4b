"""What records say: time hidden and exposed, and two runs side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.graph import Lane, Task
from penstock.mesh import Group
from penstock.step import StepShape
from penstock.trace import Occupation, TaskRecord, compare, occupation, overhead_s, write_comparison
from tests.steps import lone_task

COMPUTE, NETWORK = lone_task("L0.AT.m0.F"), lone_task("L0.D.m0.c0.F")


@st.composite
def records(draw: st.DrawFn) -> list[TaskRecord]:
    """Records on whole seconds; they may overlap, as those of two lanes of one kind do."""
    spans = st.tuples(st.sampled_from([COMPUTE, NETWORK]), st.integers(0, 20), st.integers(0, 6))
    return [
        TaskRecord(task, 0, start, start + length)
        for task, start, length in draw(st.lists(spans, min_size=1, max_size=8))
    ]


@given(records())
def test_occupation_counts_seconds(run: list[TaskRecord]) -> None:
    def seconds(lane: Lane) -> set[int]:
        return {s for r in run if r.lane is lane for s in range(int(r.start_s), int(r.end_s))}

    compute, network = seconds(Lane.COMPUTE), seconds(Lane.INTER)
    assert occupation(run) == Occupation(
        iteration_s=max(r.end_s for r in run) - min(r.start_s for r in run),
        compute_s=len(compute),
        communication_s=len(network),
        exposed_s=len(network - compute),
    )


@given(records())
def test_no_more_is_exposed_than_was_sent(run: list[TaskRecord]) -> None:
    found = occupation(run)
    assert 0.0 <= found.exposed_s <= found.communication_s


def test_a_group_of_one_rank_sends_nothing() -> None:
    run = [TaskRecord(COMPUTE, 0, 1.0, 3.0), TaskRecord(NETWORK, 0, 2.0, 4.0)]
    found = occupation(run, silent=[Group.EXPERT])
    assert found == Occupation(iteration_s=2.0, compute_s=2.0, communication_s=0.0, exposed_s=0.0)
    assert occupation(run, silent=[Group.WORLD]) == occupation(run)


def test_half_hidden() -> None:
    found = occupation([TaskRecord(COMPUTE, 0, 1.0, 3.0), TaskRecord(NETWORK, 0, 2.0, 4.0)])
    assert found == Occupation(iteration_s=3.0, compute_s=2.0, communication_s=2.0, exposed_s=1.0)


def test_no_records_are_no_time() -> None:
    found = occupation([])
    assert found == Occupation(iteration_s=0.0, compute_s=0.0, communication_s=0.0, exposed_s=0.0)


def test_a_comparison_has_a_row_per_task_in_measured_order() -> None:
    tasks = build_graph(StepShape(moe_layers=(True,))).tasks
    predicted = [TaskRecord(task, 0, i, i + 1.0) for i, task in enumerate(tasks)]
    measured = [TaskRecord(task, 0, 100.0 - i, 100.0 - i + 3.0) for i, task in enumerate(tasks)]
    rows = compare(predicted, measured)
    assert [row.task for row in rows] == list(reversed(tasks))
    assert all(row.predicted.task == row.measured.task == row.task for row in rows)
    assert {row.difference_s for row in rows} == {2.0}


def test_a_written_comparison_is_a_table(tmp_path: Path) -> None:
    predicted, measured = [TaskRecord(COMPUTE, 0, 0.0, 1.0)], [TaskRecord(COMPUTE, 0, 0.5, 2.0)]
    write_comparison(tmp_path / "tasks.csv", compare(predicted, measured))
    head, row = (tmp_path / "tasks.csv").read_text().splitlines()
    assert head == "task,lane,predicted_start_s,predicted_end_s,measured_start_s,measured_end_s"
    assert row == f"{COMPUTE},compute,0.000000,1.000000,0.500000,2.000000"


def test_overhead_is_standing_still_although_everything_is_ready() -> None:
    """The second compute task waits for the network (no overhead), the third for nothing (0.5 s overhead)."""
    first, second, third = (lone_task(f"L{i}.AT.m0.F") for i in range(3))
    needs: Mapping[Task, tuple[Task, ...]] = {
        first: (),
        NETWORK: (first,),
        second: (NETWORK,),
        third: (second,),
    }
    times = [(first, 0.0, 1.0), (NETWORK, 1.0, 3.0), (second, 3.25, 4.0), (third, 4.5, 5.0)]
    records = [TaskRecord(task, 0, start, end) for task, start, end in times]
    assert overhead_s(records, needs, Lane.COMPUTE) == pytest.approx(0.25 + 0.5)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_task_of_one_run_alone_is_named(swapped: bool) -> None:
    both = [TaskRecord(COMPUTE, 0, 0.0, 1.0)]
    runs = [both, [*both, TaskRecord(NETWORK, 0, 1.0, 2.0)]]
    first, second = reversed(runs) if swapped else runs
    with pytest.raises(ValueError, match=re.escape(f"{NETWORK} is in only one of the two runs")):
        compare(first, second)


def test_a_record_knows_its_lane_and_duration() -> None:
    record = TaskRecord(NETWORK, 3, 1.0, 1.5)
    assert (record.lane, record.duration_s, record.step) == (Lane.INTER, 0.5, 0)
