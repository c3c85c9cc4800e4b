"""The chain that a step is as long as, in steps whose chain is known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.graph import Lane
from penstock.mesh import Mesh
from penstock.timing import Timeline, simulate
from penstock.trace.analysis import critical_path
from tests.steps import PLAIN, example_plan, random_seconds

RANKS = 2
MESH = Mesh(world_size=RANKS, ep_size=RANKS)


plan_of = cache(example_plan)


def simulated(schedule: str, seed: int) -> Timeline:
    """A step in which the second rank computes at another speed than the first."""
    plan = plan_of(schedule)
    seconds = random_seconds(plan.graph, seed)
    pace = np.array([1.0, 0.5 + seed % 3])
    return simulate(
        plan.schedule,
        plan.graph,
        lambda task: seconds[task] * (pace if task.lane is Lane.COMPUTE else np.ones(RANKS)),
        MESH,
    )


@given(st.sampled_from(PLAIN), st.integers(0, 2**16))
def test_a_simulated_step_has_no_pauses_and_is_as_long_as_its_path(schedule: str, seed: int) -> None:
    """Also where ranks wait for the slowest: the path goes on where the last of them began."""
    timeline = simulated(schedule, seed)
    graph = plan_of(schedule).graph
    path = critical_path(timeline.records(), graph.needs, MESH)
    assert sum(link.end_s - link.start_s for link in path) == pytest.approx(timeline.iteration_s)
    assert sum(link.gap_s for link in path) == pytest.approx(0.0, abs=1e-9)
    assert path[0].start_s == 0.0 and path[-1].end_s == pytest.approx(timeline.iteration_s)
    for before, link in itertools.pairwise(path):
        assert link.start_s == pytest.approx(before.end_s)
        assert before.task in graph.needs[link.task] or before.task.lane is link.task.lane


def test_a_pause_belongs_to_the_task_after_it() -> None:
    """All moments a second later, but for the first task: its lane stood still that long."""
    timeline = simulated("flowmoe", 1)
    graph = plan_of("flowmoe").graph
    records = timeline.records()
    first = min(records, key=lambda record: (record.start_s, record.rank))
    late = [
        record
        if record.task == first.task
        else type(record)(record.task, record.rank, record.start_s + 1.0, record.end_s + 1.0)
        for record in records
    ]
    path = critical_path(late, graph.needs, MESH)
    pauses = [link.gap_s for link in path if link.gap_s > 1e-9]
    assert pauses == [pytest.approx(1.0)]


@example("sequential", 1, -0.03125)  # what the second rank did first ends before the step begins
@given(st.sampled_from(PLAIN), st.integers(0, 2**16), st.floats(-0.5, 0.5))
def test_a_wrong_clock_makes_no_path_longer_than_the_step(schedule: str, seed: int, wrong: float) -> None:
    """What the second rank did seems later or earlier than it was, also than what had to wait for it."""
    timeline = simulated(schedule, seed)
    shift = wrong * timeline.iteration_s
    records = [
        replace(each, start_s=each.start_s + shift, end_s=each.end_s + shift) if each.rank else each
        for each in timeline.records()
    ]
    path = critical_path(records, plan_of(schedule).graph.needs, MESH)
    whole_s = sum(link.end_s - link.start_s + link.gap_s for link in path)
    assert whole_s == pytest.approx(max(each.end_s for each in records))
    assert all(link.gap_s >= 0 for link in path)


def test_nothing_ran() -> None:
    assert critical_path([], {}, MESH) == []
