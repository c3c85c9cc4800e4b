"""Whole gradients of two layers at a time: what first adds to a layer's waits for the sums two above."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.features.sharded_optimizer.feature import LAYERS
from penstock.ops.gradients import summed
from penstock.step import StepShape
from penstock.step.shape import Updating
from tests.step.support import ancestors
from tests.steps import SHARED, shapes
from tests.support.draws import draws


def test_the_picture_is_true() -> None:
    shape = StepShape(moe_layers=(True,) * 3, all_reduce_chunks=(2,) * 3, updating=Updating())
    kept, released = (
        build_graph(replace(shape, updating=Updating(releases=releases))) for releases in (False, True)
    )
    assert not any("room" in task.inputs for task in kept.tasks)
    (first,) = [task for task in released.tasks if "room" in task.inputs]
    assert str(first) == "L0.U.m0.B"
    assert list(map(str, first.inputs["room"])) == ["L2.RA.p0.B", "L2.RA.p1.B"]


@draws(40)
@given(shapes(layers=4), st.booleans(), st.booleans(), st.booleans())
def test_no_gradient_is_made_before_those_two_layers_above_are_summed(
    shape: StepShape, edp: bool, split_experts: bool, shared: bool
) -> None:
    sharing = SHARED if shared and len(shape.dispatch) == 1 else shape.sharing
    updating = Updating(edp=edp, releases=True)
    graph = build_graph(replace(shape, updating=updating, split_experts=split_experts, sharing=sharing))
    sums = [task for task in graph.tasks if summed(task.op) and (edp or task.op != "RX")]
    for task in graph.tasks:
        if task.accumulates:
            before = ancestors(graph, task)
            above = {each for each in sums if each.layer == task.layer + LAYERS}
            assert above <= before, f"{task} adds before there is room"
