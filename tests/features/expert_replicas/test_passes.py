"""Experts as replicas: what waits for them, what they wait for, and which state is touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.features.expert_replicas.feature import PlannedReplicas, ReplicaGradients, Replicas
from penstock.graph import Graph, Lane, ScheduleError
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.core import KindName
from penstock.step import StepShape
from penstock.step.passes import GradientPieces, Microbatches, Parts, Transpose
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import check_picture
from tests.step.support import ancestors, names, reads
from tests.steps import SHARED, shapes, task_at
from tests.support.draws import draws

PLAIN = PlainStep(moe_layers=(True, True)).graph()


def whole() -> Graph:
    return Microbatches(2)(Transpose()(Replicas(2)(PLAIN)))


def test_the_pictures_are_true() -> None:
    check_picture(Replicas, PLAIN, Replicas(2)(PLAIN).check(), layer=1)
    check_picture(ReplicaGradients, whole(), ReplicaGradients(2)(whole()), layer=1)


def test_parameters_wait_for_nothing_and_every_piece_of_experts_for_all_of_them() -> None:
    graph = whole()
    piece = task_at(graph, "L1.GP.p1.F")
    assert (piece.inputs, piece.lane, piece.axes, piece.cut.parts) == ({}, Lane.INTER, Group.EXPERT, (1, 1))
    assert piece.reads == ("expert parameters of L1",)
    assert piece.writes == ("replica parameters of L1",)
    for name in ("L1.X.m0.c0.F", "L1.X.m1.c0.F"):
        assert reads(graph, name)["replicas"] == "L1.GP.p0.F L1.GP.p1.F"


def test_they_stand_at_the_beginning_of_their_layer() -> None:
    found = [name for name in names(Replicas(1)(PLAIN)) if name.startswith("L1")]
    assert found[:2] == ["L1.GP.p0.F", "L1.AT.m0.F"]


def test_gradients_come_home_before_replicas_are_summed() -> None:
    pieces: dict[KindName, Parts] = {"replicated": [(1,), (1,)], "experts": [(1,), (1,)]}
    graph = GradientPieces(pieces)(ReplicaGradients(2)(whole())).check()
    assert reads(graph, "L1.GG.p0.B") == {"gradients": "L1.X.m0.c0.B L1.X.m1.c0.B"}
    assert task_at(graph, "L1.X.m0.c0.B").accumulates == (
        "expert gradients of L1",
        "replica gradients of L1",
    )
    assert task_at(graph, "L1.GG.p1.B").accumulates == ("expert gradients of L1",)
    assert reads(graph, "L1.XR.p0.B") == {"gradients": "L1.GG.p0.B L1.GG.p1.B"}


def test_the_next_replicas_are_planned_from_loads_and_compared_at_the_end() -> None:
    plain = StepShape(moe_layers=(True,), gathers_loads=True)
    graph = build_graph(replace(plain, replica_slots=1))
    check_picture(PlannedReplicas, build_graph(plain), graph, layer=0)
    plan, compare = task_at(graph, "L0.PE.B"), task_at(graph, "L0.PH.B")
    assert (plan.lane, plan.axes) == (Lane.HOST, ())
    assert (compare.lane, compare.axes) == (Lane.INTER, Group.EXPERT)
    assert graph.readers[compare] == ()
    shared = replace(plain, replica_slots=1, sharing=SHARED)
    assert task_at(build_graph(shared), "L0.PH.B").axes == Group.EXPERT_SHARDS


@draws(40)
@given(shapes(layers=2, dense=False), st.booleans(), st.integers(1, 3))
def test_they_fit_into_every_step(shape: StepShape, split_experts: bool, pieces: int) -> None:
    shape = replace(shape, exchange_counts=True, split_experts=split_experts)
    graph = build_graph(replace(shape, replica_slots=1, replica_pieces=pieces))
    home = [task for task in graph.tasks if task.op == Op.REPLICA_GRADIENTS]
    assert len(home) == pieces * shape.num_layers
    for task in home:
        adding = {t for t in graph.tasks if f"replica gradients of L{task.layer}" in t.accumulates}
        assert adding and adding <= ancestors(graph, task)
    without = build_graph(shape)
    moves = (Op.REPLICA_PARAMETERS, Op.REPLICA_GRADIENTS)
    assert [t.name for t in graph.tasks if t.op not in moves] == names_of(without)


def names_of(graph: Graph) -> list[object]:
    return [task.name for task in graph.tasks]


def test_where_every_expert_has_fixed_slots_they_are_refused() -> None:
    with pytest.raises(ScheduleError, match="replica_slots: every expert has a fixed number of rows"):
        build_graph(StepShape(moe_layers=(True,), exchange_counts=False, replica_slots=1))
    with pytest.raises(ScheduleError, match="replica slots are 0 or more"):
        StepShape(moe_layers=(True,), replica_slots=-1)


def test_a_dense_step_has_none() -> None:
    assert build_graph(StepShape(moe_layers=(False,), replica_slots=1)) == build_graph(
        StepShape(moe_layers=(False,))
    )
