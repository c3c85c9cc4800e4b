"""Searched orders beside the best that there are, which constraint programming proves."""

from __future__ import annotations

from statistics import mean

import pytest

from penstock.decision import Decision
from penstock.schedule import SCHEDULES
from penstock.timing import iteration_s
from tests.support.optimum import shortest_s, small_step


@pytest.mark.slow
@pytest.mark.parametrize("cases", [8, pytest.param(40, marks=pytest.mark.soak)])
def test_orders_are_near_the_best_on_small_steps(cases: int) -> None:
    gaps = []
    for seed in range(cases):
        graph, seconds = small_step(seed)
        found = SCHEDULES["penstock"].order(graph, seconds.__getitem__, Decision(schedule="penstock"))
        found.check(graph)
        best_s = shortest_s(graph, seconds)
        gaps.append(iteration_s(found, graph, seconds.__getitem__) / best_s - 1)
    assert min(gaps) > -1e-9, "the solver has left something out"
    assert mean(gaps) < 0.005
    assert max(gaps) < 0.03
