"""What a schedule leaves the network for replicas: gaps of its own simulation, each for one layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.autotune.planned import Planned
from penstock.cost import StepCost
from penstock.decision import Decision, Movable, PlacementConfig
from penstock.features.expert_replicas.problem import Slack
from penstock.graph import Lane, Task
from penstock.mesh import Mesh
from penstock.ops import Op
from penstock.plan.problem import REPLICAS, replica_slack
from penstock.schedule import SCHEDULES, plan_step
from penstock.step import StepShape
from tests.plan.problems import problem
from tests.steps import gradients_of

SHAPE = StepShape(moe_layers=(True, False, True))
CHOICE = Decision(schedule="sequential", experts="planned")


def seconds(task: Task) -> float:
    """Transfers of rows take two, computation one, what else is exchanged nothing; replicas take for ever."""
    if task.op in REPLICAS:
        return 1e6
    if task.op in (Op.DISPATCH, Op.COMBINE, Op.COUNTS):
        return 2.0
    return float(task.lane is Lane.COMPUTE)


def test_gaps_between_transfers_are_counted_once_each_for_the_layer_that_is_next_or_was_last() -> None:
    plan = plan_step(CHOICE, SHAPE, gradients_of(SHAPE), lambda _: seconds)
    first, last = replica_slack(plan, seconds, Mesh())
    assert first == Slack(forward_s=2.0, backward_s=2.0), "embedding and attention"
    assert last == Slack(forward_s=4.0, backward_s=4.0), "experts, sum, a dense block and attention"


@pytest.mark.parametrize("name", ["flowmoe", "penstock"])
@pytest.mark.slow
def test_where_transfers_are_hidden_less_is_left(name: str) -> None:
    """All gaps together are no longer than the lane is idle in all."""
    each = replace(CHOICE, schedule=name, microbatches=2)
    plan = plan_step(each, SHAPE, gradients_of(SHAPE), lambda _: seconds)
    slack = replica_slack(plan, seconds, Mesh())
    computed = sum(seconds(task) for task in plan.graph.tasks if task.lane is Lane.COMPUTE)
    assert 0 <= sum(map(sum, slack)) < computed
    assert SCHEDULES[name].name == plan.schedule.name


def test_replicas_are_planned_with_the_slack_of_the_plan_in_use() -> None:
    each = replace(problem(), movable=Movable(experts=("planned",)))
    plan = each.plan(CHOICE)
    moving = Planned(problem=each, choice=CHOICE, plan=plan).moving(PlacementConfig(experts="planned"))
    assert moving is not None
    even = StepCost(plan.shape, each.workload_of(CHOICE), each.cluster)
    assert moving.slack == replica_slack(plan, even, each.mesh) and len(moving.slack) == 2
    for layer, slack in enumerate(moving.slack):
        assert moving.costs_of(layer).slack_s(1e9) == slack
        assert moving.costs.slack_s(1.0) == pytest.approx(
            (1 + moving.costs.other_s, 2 + 2 * moving.costs.other_s)
        )
