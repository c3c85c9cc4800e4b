"""Planners side by side: loads that stay skewed while they drift, and what a table says of a planner."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.planners import CONTENDERS, EXACT, render_planners, simulate_planners
from benchmarks.skewed import HOT, HOT_SHARE, ROWS, costs, drifting_loads
from penstock.features.expert_replicas.planners import overlap


def test_loads_stay_skewed_and_resemble_those_of_the_step_before() -> None:
    loads = list(drifting_loads(16, 20))
    for each in loads:
        by_expert = np.sort(each.sum(axis=0))[::-1]
        assert by_expert[:HOT].sum() / by_expert.sum() > HOT_SHARE - 0.05
    assert min(overlap(a, b) for a, b in pairwise(loads)) > overlap(loads[0], loads[-1])


def test_the_ratio_is_that_of_transfers_to_experts_under_even_routing() -> None:
    for ratio in (0.5, 2.0):
        priced = costs(16, ratio)
        rows_s = 4 * priced.row_bytes * priced.links.seconds(np.full((16, 16), ROWS / 16))
        assert np.isclose(rows_s, ratio * 3 * priced.row_s * ROWS)


@pytest.mark.slow
def test_the_tables() -> None:
    result = simulate_planners(steps=1, ratios=(0.2,), drifts=(0.0,))
    rows = {(row.planner, row.replica_slots): row for row in result.planners}
    assert set(rows) == {("none", 1)} | {(name, slots) for name in CONTENDERS for slots in (1, 2)}
    assert rows["least_loaded" + EXACT, 2].imbalance < rows["least_loaded", 2].imbalance
    none, best = rows["none", 1], rows["planned", 2]
    assert (none.speedup, none.dropped) == (1.0, 0.0)
    assert best.imbalance < 1.2 and none.imbalance > 2.5 and best.deviation < none.deviation
    assert best.speedup > rows["pro_prophet", 2].speedup > 1
    lines = [line.split() for line in render_planners(result).splitlines()]
    assert ["|", "planned", "|", "2", "|"] in [line[:5] for line in lines]
    assert ["|", "0.2", "|"] in [line[:3] for line in lines]
    assert lines[-1][:4] == ["|", "0", "|", "98"]
