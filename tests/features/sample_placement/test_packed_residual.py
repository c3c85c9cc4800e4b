"""Rows that bring the residual stream: what no longer follows samples, and who makes the norm."""

from __future__ import annotations

from penstock.features.build import build_graph
from penstock.features.sample_placement.feature import MoveSamples, PackedResidualPass
from penstock.graph import Phase
from penstock.step import Sharing, StepShape
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import edges, holds, picture
from tests.step.support import names, reads
from tests.steps import task_at

MOVED = MoveSamples()(PlainStep(moe_layers=(True, True), shared_experts=True).graph())
PACKED = PackedResidualPass()(MOVED).check()


def test_the_picture_is_true() -> None:
    earlier, later = map(edges, picture(PackedResidualPass))
    assert all(holds(MOVED, edge, layer=1) for edge in earlier)
    assert [holds(PACKED, edge, layer=1) for edge in earlier] == [False] * 4 + [True]
    assert all(holds(PACKED, edge, layer=1) for edge in later)
    assert not {"residual", "weights"} & {*reads(PACKED, "L1.SM.m0.F"), *reads(PACKED, "L1.U.m0.F")}
    assert reads(PACKED, "L1.U.m0.F")["shared"] == "L1.SM.m0.F"


def test_experts_add_to_the_gradients_of_the_norm_when_their_inputs_are_made() -> None:
    shape = StepShape(moe_layers=(True,), moves_samples=True, carries_residual=True, split_experts=True)
    graph = build_graph(shape)
    adds = {str(task): task.accumulates for task in graph.tasks if task.op == "X"}
    assert adds == {
        "L0.X.m0.c0.F": (),
        "L0.X.m0.c0.I": ("gradients of L0",),
        "L0.X.m0.c0.W": ("expert gradients of L0",),
    }
    shared = build_graph(
        StepShape(
            moe_layers=(True,),
            moves_samples=True,
            carries_residual=True,
            sharing=Sharing(tp_size=2, etp_size=2),
        )
    )
    assert "partial gradients of L0" in task_at(shared, "L0.X.m0.c0.B").accumulates


def test_without_shared_experts_nothing_of_a_sample_comes_back_by_itself() -> None:
    shape = StepShape(moe_layers=(True,), moves_samples=True, carries_residual=True)
    assert not any(task.op == "SM" and task.phase is Phase.BACKWARD for task in build_graph(shape).tasks)
    assert "L0.SM.m0.B" in names(build_graph(StepShape(moe_layers=(True,), moves_samples=True)))


def test_where_samples_stay_rows_are_as_always() -> None:
    with_it, without = (
        build_graph(StepShape(moe_layers=(True,), carries_residual=carries)) for carries in (True, False)
    )
    assert with_it.facts() == without.facts()
