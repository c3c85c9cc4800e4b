"""The task that tells all ranks the loads of experts: what it reads, and that nothing waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.graph import Lane
from penstock.mesh import Group
from penstock.ops import Op
from penstock.schedule import SCHEDULES, unit_cost
from penstock.step import StepShape
from penstock.step.passes import GatheredLoads, Microbatches, Transpose
from penstock.step.plain import PlainStep
from penstock.timing import iteration_s
from tests.step.passes.pictures import check_picture
from tests.step.support import ancestors
from tests.steps import SHARED, gradients_of, shapes, task_at
from tests.support.draws import draws


def test_the_picture_is_true() -> None:
    graph = Microbatches(2)(Transpose()(PlainStep(moe_layers=(False, True)).graph()))
    check_picture(GatheredLoads, graph, GatheredLoads()(graph), layer=1)


def test_it_reads_every_gate_whatever_task_has_it() -> None:
    shape = StepShape(moe_layers=(True, False, True), microbatches=2, sharing=SHARED, gathers_loads=True)
    task = task_at(build_graph(shape), "L2.LG.B")
    gates = ["L0.GT.m0.F", "L0.GT.m1.F", "L2.GT.m0.F", "L2.GT.m1.F"]
    assert [str(name) for name in task.inputs["routers"]] == gates
    assert (task.lane, task.axes) == (Lane.INTER, Group.WORLD)


@draws(40)
@given(shapes())
def test_nothing_waits_for_it_and_a_model_without_gates_has_none(shape: StepShape) -> None:
    with_loads, without = (build_graph(replace(shape, gathers_loads=on)) for on in (True, False))
    added = [task for task in with_loads.tasks if task not in set(without.tasks)]
    assert [task.op for task in added] == [Op.LOADS] * any(shape.moe_layers)
    assert [task for task in with_loads.tasks if task not in set(added)] == list(without.tasks)
    for task in added:
        assert not with_loads.readers[task]
        assert task_at(with_loads, f"L{shape.last}.ST.F") in ancestors(with_loads, task)


@pytest.mark.slow
def test_schedules_put_it_where_it_holds_nothing_up() -> None:
    """One slot of the network under the backward of the head and what follows it."""
    base = StepShape(moe_layers=(True, True))
    for name, system in SCHEDULES.items():
        found = []
        for on in (True, False):
            choice = Decision(schedule=name, microbatches=2)
            shape = system.shape(replace(base, gathers_loads=on), choice, gradients_of(base))
            graph = build_graph(shape)
            found.append(iteration_s(system.order(graph, unit_cost, choice), graph, unit_cost))
        assert found[0] == found[1], name
