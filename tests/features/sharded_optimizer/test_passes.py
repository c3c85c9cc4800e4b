"""The tasks of a sharded optimiser: who waits for whom, and that no reader meets old parameters."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.features.sharded_optimizer.feature import GATHERS, LAYERS, UPDATES, ShardedOptimizer
from penstock.graph import Graph, Lane
from penstock.mesh import Group
from penstock.ops.core import summed as is_sum
from penstock.step import StepShape
from penstock.step.passes import GradientPieces, Transpose
from penstock.step.plain import PlainStep
from penstock.step.shape import Updating
from tests.step.passes.pictures import check_picture
from tests.step.support import ancestors, reads
from tests.steps import SHARED, shapes, task_at
from tests.support.draws import draws


def summed() -> Graph:
    plain = Transpose()(PlainStep(moe_layers=(True, True)).graph())
    return GradientPieces({"replicated": [(1, 1), (1, 1)], "experts": [(1,), (1,)]}, scatters=True)(plain)


def test_the_picture_is_true() -> None:
    check_picture(ShardedOptimizer, summed(), ShardedOptimizer(True, True)(summed()).check(), layer=0)


def test_updates_wait_for_the_norm_only_where_gradients_are_clipped() -> None:
    clipped, free = (ShardedOptimizer(clips, True)(summed()).check() for clips in (True, False))
    assert reads(clipped, "L1.OA.p1.B") == {"gradients": "L1.RA.p1.B", "scale": "L0.NM.B"}
    assert reads(free, "L1.OA.p1.B") == {"gradients": "L1.RA.p1.B"}
    assert reads(free, "L0.NM.B") == reads(clipped, "L0.NM.B")
    update = task_at(free, "L1.OX.p0.B")
    assert (update.lane, update.axes) == (Lane.COMPUTE, ())
    assert update.writes == ("expert parameters of L1", "expert moments of L1")


def test_experts_without_replicas_are_gathered_by_nobody() -> None:
    graph = ShardedOptimizer(True, False)(summed()).check()
    assert {task.op for task in graph.tasks if task.op in GATHERS} == {"PA"}
    gather = task_at(graph, "L1.PA.p0.F")
    assert (gather.inputs, gather.lane, gather.axes) == ({}, Lane.INTER, Group.WORLD)


def test_what_the_next_step_begins_with_is_gathered_while_others_are_updated() -> None:
    graph = ShardedOptimizer(True, True)(summed()).check()
    assert reads(graph, "L0.PA.p1.B") == {"updated": "L0.OA.p1.B"}
    assert {str(task) for task in graph.tasks if task.op in GATHERS and task.layer == 0} == {
        *("L0.PA.p0.B", "L0.PA.p1.B"),
        "L0.PX.p0.F",
    }
    updates = [str(task) for task in graph.tasks if task.op in UPDATES]
    assert updates[:2] == ["L0.OA.p0.B", "L0.OA.p1.B"], "theirs go first"


@draws(60)
@given(shapes(layers=3), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_every_reader_has_what_was_gathered_and_no_update_comes_before_it(
    shape: StepShape, clips: bool, edp: bool, split_experts: bool, shared: bool
) -> None:
    """In a step that begins with what the one before has gathered at its end."""
    sharing = SHARED if shared and len(shape.dispatch) == 1 else shape.sharing
    updating = Updating(clips=clips, edp=edp)
    cut = replace(shape, updating=updating, split_experts=split_experts, sharing=sharing)
    graph = build_graph(cut)
    gathers = [task for task in graph.tasks if task.op in GATHERS]
    of_pieces = UPDATES | GATHERS  # each has to do with its own piece
    for task in graph.tasks:
        before = ancestors(graph, task)
        for gather in gathers:
            if gather.forward and gather.writes[0] in task.reads:
                assert gather in before, f"{task} reads what {gather} brings"
            if not gather.forward and gather.writes[0] in task.reads and task.op not in of_pieces:
                assert task in ancestors(graph, gather), f"{gather} changes what {task} has still to read"
        if task.op in UPDATES:
            readers = {t for t in graph.tasks if task.writes[0] in t.reads and t.op not in of_pieces}
            assert readers <= before, f"{task} changes what others have still to read"
    updated = {task.writes[0] for task in graph.tasks if task.op in UPDATES}
    alone = {state for state in updated if not edp and state.startswith("expert")}
    assert {gather.writes[0] for gather in gathers} == updated - alone, "every rank gets what changes"


# ---- room for whole gradients ------------------------------------------------------------------------------


def test_the_picture_of_rooms_is_true() -> None:
    shape = StepShape(moe_layers=(True,) * 3, pieces={"replicated": (2,) * 3}, updating=Updating())
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
    sums = [task for task in graph.tasks if is_sum(task.op) and (edp or task.op != "RX")]
    for task in graph.tasks:
        if task.accumulates:
            before = ancestors(graph, task)
            above = {each for each in sums if each.layer == task.layer + LAYERS}
            assert above <= before, f"{task} adds before there is room"
