"""Orders of steps that keep whole gradients of two layers at a time: none deadlocks, little is moved."""

from __future__ import annotations

import pytest

from penstock.decision import Decision, GradientBytes
from penstock.graph import Lane
from penstock.ops.gradients import summed
from penstock.schedule import SCHEDULES, StepPlan, plan_step, unit_cost
from penstock.step import StepShape
from penstock.step.shape import Updating
from tests.steps import SHARED
from tests.support.searching import short_search

LAYERS = 5
BYTES = GradientBytes((4096,) * LAYERS, (4096,) * LAYERS, (1024,) * LAYERS)


def planned(name: str, *, releases: bool, edp: bool) -> StepPlan:
    """A step of that schedule, cut where it can be. Raises ScheduleError for one that deadlocks."""
    shape = StepShape(
        moe_layers=(True, True, False, True, True),
        sharing=SHARED if SCHEDULES[name].expert_form else StepShape(moe_layers=(True,)).sharing,
        updating=Updating(releases=releases, edp=edp),
    )
    choice = Decision(schedule=name, microbatches=2, chunks=2, all_reduce_chunk_bytes=2048)
    with short_search():
        return plan_step(choice, shape, BYTES, lambda _: unit_cost)


@pytest.mark.parametrize("edp", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_an_order(name: str, edp: bool) -> None:
    plan = planned(name, releases=True, edp=edp)
    plan.schedule.check(plan.graph)
    assert any("room" in task.inputs for task in plan.graph.tasks)


def test_only_sums_are_moved_and_no_earlier_than_something_waits_for_them() -> None:
    kept, released = (planned("sequential", releases=each, edp=True) for each in (False, True))
    for (lane, before), after in zip(
        kept.schedule.lanes.items(), released.schedule.lanes.values(), strict=True
    ):
        names = [[task.name for task in order if not summed(task.op)] for order in (before, after)]
        assert names[0] == names[1], lane
    inter = [task.name for task in released.schedule.lanes[Lane.INTER]]
    first = min(i for i, name in enumerate(inter) if name.layer == 4 and summed(name.op))
    assert inter[first - 1].layer == 3, "layer 2 is the first that waits"
