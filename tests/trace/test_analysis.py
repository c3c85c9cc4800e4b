"""What records say: time hidden and exposed, and two runs side by side."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Lane, StepShape, Task, build_graph
from penstock.trace import Occupation, TaskRecord, compare, occupation

COMPUTE, NETWORK = Task.parse("L0.AT.m0.F"), Task.parse("L0.D.m0.c0.F")


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
def test_efficiency_is_a_share(run: list[TaskRecord]) -> None:
    found = occupation(run)
    assert 0.0 <= found.overlap_efficiency <= 1.0
    assert found.exposed_s <= found.communication_s


def test_half_hidden() -> None:
    found = occupation([TaskRecord(COMPUTE, 0, 1.0, 3.0), TaskRecord(NETWORK, 0, 2.0, 4.0)])
    assert found == Occupation(iteration_s=3.0, compute_s=2.0, communication_s=2.0, exposed_s=1.0)
    assert found.overlap_efficiency == pytest.approx(2 / 3)


def test_no_records_are_no_time() -> None:
    found = occupation([])
    assert found == Occupation(iteration_s=0.0, compute_s=0.0, communication_s=0.0, exposed_s=0.0)
    assert found.overlap_efficiency == 1.0


def test_a_comparison_has_a_row_per_task_in_measured_order() -> None:
    tasks = build_graph(StepShape(moe_layers=(True,))).tasks
    predicted = [TaskRecord(task, 0, i, i + 1.0) for i, task in enumerate(tasks)]
    measured = [TaskRecord(task, 0, 100.0 - i, 100.0 - i + 3.0) for i, task in enumerate(tasks)]
    rows = compare(predicted, measured)
    assert [row.task for row in rows] == list(reversed(tasks))
    assert {(row.predicted_s, row.measured_s, row.difference_s) for row in rows} == {(1.0, 3.0, 2.0)}


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
