"""Ranks that compute slowly: told from those that differ a little, and from those with more rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.ops import Op
from penstock.step import StepShape
from penstock.trace import TaskRecord
from penstock.trace.analysis import SLOW, stragglers, typical_seconds

GRAPH = build_graph(StepShape(moe_layers=(True, True), moves_samples=True))
OF_ROWS = {Op.EXPERTS, Op.ROW_ORDER}


def ran(rank: int, factor: float = 1.0, experts: float = 1.0) -> list[TaskRecord]:
    """A step of which every task took a millisecond, but for these factors."""

    def seconds(op: str, *, computes: bool) -> float:
        own = experts if op in OF_ROWS else factor
        return 1e-3 * (own if computes else 7.0)

    return [
        TaskRecord(task, rank, 0.0, seconds(task.op, computes=task.lane.computes)) for task in GRAPH.tasks
    ]


def found(factors: list[float], experts: float = 1.0) -> dict[int, float]:
    everyone = [typical_seconds(ran(rank, factor, experts)) for rank, factor in enumerate(factors)]
    return {each.rank: each.factor for each in stragglers(everyone)}


@pytest.mark.parametrize(
    ("factors", "slow"),
    [
        ([1.0], {}),
        ([1.0, 4.0], {1: 4.0}),
        ([4.0, 1.0], {0: 4.0}),
        ([1.0, 1.4], {}),
        ([1.0, 1.0, 2.0, 3.0], {2: 2.0, 3: 3.0}),
        ([0.1, 1.0, 1.0, 1.0], {}),
    ],
)
def test_a_rank_is_named_with_its_factor(factors: list[float], slow: dict[int, float]) -> None:
    assert found(factors) == pytest.approx(slow)


def test_more_rows_for_a_ranks_experts_do_not_make_it_slow() -> None:
    even, busy = typical_seconds(ran(0)), typical_seconds(ran(1, experts=50.0))
    assert stragglers([even, busy]) == ()
    assert {task.op for task in GRAPH.tasks} >= OF_ROWS
    assert busy and not OF_ROWS & {op for op, _ in busy}


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=9))
def test_nobody_is_slow_beside_slower_ones(factors: list[float]) -> None:
    slow = found(factors)
    assert all(factor >= SLOW for factor in slow.values()) and len(slow) <= len(factors) // 2
    assert all(factors[rank] > max((f for r, f in enumerate(factors) if r not in slow)) for rank in slow)


def test_tasks_that_took_no_time_tell_nothing() -> None:
    assert found([0.0, 0.0]) == {}
