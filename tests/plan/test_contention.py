"""Company in a timeline, and the fixed point it leads to, against sums worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.graph import Lane, Task
from penstock.mesh import Mesh
from penstock.ops import Op
from penstock.plan.predict import contention, settle
from penstock.schedule import SCHEDULES, StepPlan, unit_cost
from penstock.step import StepShape
from penstock.timing import Interval, Timeline, iteration_s
from tests.steps import lone_task


def test_shares_of_a_timeline() -> None:
    spans = {
        "L0.AT.m0.F": (0.0, 4.0),  # the dispatch covers its last quarter
        "L0.AT.m1.F": (4.0, 6.0),  # the dispatch and the next one all of it
        "L0.X.m0.c0.F": (7.0, 11.0),  # two transfers, a quarter each
        "L0.U.m0.F": (20.0, 21.0),  # nobody
        "L0.D.m0.c0.F": (3.0, 5.0),
        "L0.D.m1.c0.F": (5.0, 8.0),  # computation for one and one of three
        "L0.C.m0.c0.F": (10.0, 12.0),
        "L0.ST.F": (20.5, 20.5),  # an instant has no time in which others could be busy
    }
    times = {
        lone_task(name): Interval(np.array([start, 99.0]), np.array([end, 100.0]))
        for name, (start, end) in spans.items()
    }
    shares = contention(Timeline(times, Mesh(world_size=2, ep_size=2)))
    assert {str(task): share for task, share in shares.items()} == pytest.approx(
        {
            "L0.AT.m0.F": 0.25,
            "L0.AT.m1.F": 1.0,
            "L0.X.m0.c0.F": 0.5,
            "L0.U.m0.F": 0.0,
            "L0.D.m0.c0.F": 1.0,
            "L0.D.m1.c0.F": 2 / 3,
            "L0.C.m0.c0.F": 0.5,
            "L0.ST.F": 0.0,
        }
    )


def plan_of(name: str, layers: int) -> StepPlan:
    """Dense layers: computation, an empty ST, and one all-reduce for every layer."""
    shape = StepShape(moe_layers=(False,) * layers, exchange_counts=False)
    graph = build_graph(shape)
    return StepPlan(graph, SCHEDULES[name].order(graph, unit_cost, Decision(schedule=name)), shape)


def settled_s(plan: StepPlan, *, reduce_s: float, slowed: float, beside_s: float) -> float:
    """A compute task takes 1 s alone, an all-reduce `slowed` times as long beside others."""

    def cost(task: Task, share: float) -> float:
        if task.lane is Lane.COMPUTE:
            return 1.0 + share * (beside_s - 1.0)
        return reduce_s * (1 + share * (slowed - 1)) if task.op == Op.ALL_REDUCE else 0.0

    shares = settle(plan, cost, Mesh())
    return iteration_s(plan.schedule, plan.graph, lambda task: cost(task, shares[task]), Mesh())


def test_a_step_without_overlap_is_a_sum_of_what_was_measured_alone() -> None:
    """Forward and backward of EM, AT and HD, one after another, then the all-reduce."""
    found_s = settled_s(plan_of("sequential", 1), reduce_s=4.0, slowed=1.5, beside_s=2.0)
    assert found_s == 6 * 1.0 + 4.0


def test_a_step_in_which_two_tasks_have_company() -> None:
    """Layer 1's all-reduce takes 2 s alone and 3 s here, as long as the two tasks of 1.5 s beside it.

    Alone: EM, AT, AT, HD forward, HD and AT backward, then at the end the all-reduce of layer 0.
    """
    found_s = settled_s(plan_of("flowmoe", 2), reduce_s=2.0, slowed=1.5, beside_s=1.5)
    assert found_s == pytest.approx(6 * 1.0 + 3.0 + 2.0)


def test_company_depends_on_durations_that_depend_on_company() -> None:
    """An all-reduce of 1 s beside a task that takes 1 s more of its time: d = 1 + 1 / d, the golden ratio."""
    found_s = settled_s(plan_of("flowmoe", 2), reduce_s=1.0, slowed=1.0, beside_s=2.0)
    golden = (1 + 5**0.5) / 2
    assert found_s == pytest.approx(6 * 1.0 + golden + 1.0 + 1.0, abs=0.03)
