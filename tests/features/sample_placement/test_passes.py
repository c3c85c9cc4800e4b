"""Samples that move: who counts, who decides, what follows, forward and backward."""

from __future__ import annotations

import pytest

from penstock.features.build import build_graph
from penstock.features.sample_placement.feature import MoveSamples, PackedResidualPass
from penstock.graph import Graph, Lane, Phase, RefusalError, ScheduleError
from penstock.mesh import Group
from penstock.step import Sharing, StepShape
from penstock.step.plain import PlainStep
from penstock.step.shape import ExpertForm, TokenLayout, Updating
from tests.step.passes.pictures import check_picture, edges, holds, picture
from tests.step.support import ancestors, names, reads
from tests.steps import task_at

PLAIN = PlainStep(moe_layers=(False, True, False, True, False), shared_experts=True).graph()
MOVED = MoveSamples()(PLAIN).check()


def test_the_picture_is_true() -> None:
    check_picture(MoveSamples, PLAIN, MOVED, layer=1)


def test_the_last_moe_layer_expects_nothing() -> None:
    assert reads(MOVED, "L1.SC.m0.F")["tokens"] == "L1.AT.m0.F"
    assert task_at(MOVED, "L1.SC.m0.F").reads == ("parameters of L3",)
    assert "tokens" not in reads(MOVED, "L3.SC.m0.F")


def test_homes_are_solved_on_the_host_and_compared_before_anything_reads_them() -> None:
    places, homes = (task_at(MOVED, f"L1.{op}.m0.F") for op in ("SP", "SH"))
    assert (places.lane, places.axes) == (Lane.HOST, ())
    assert (homes.lane, homes.axes) == (Lane.INTER, Group.EXPERT)
    readers = {str(task.name) for task in MOVED.readers[places]}
    assert readers == {"L1.SH.m0.F"}


def test_later_tasks_know_whose_tokens_they_have() -> None:
    came = {str(t): reads(MOVED, str(t)).get("metadata") for t in MOVED.tasks}
    assert came["L0.AT.m0.F"] is None and came["L1.AT.m0.F"] is None
    assert came["L1.U.m0.F"] == came["L2.AT.m0.F"] == came["L3.AT.m0.F"] == came["L3.SM.m0.F"] == "L1.SM.m0.F"
    assert came["L3.U.m0.F"] == came["L4.AT.m0.F"] == came["L4.HD.m0.F"] == "L3.SM.m0.F"


def backward() -> Graph:
    return build_graph(StepShape(moe_layers=(True, True), shared_experts=True, moves_samples=True))


def test_gradients_go_back_to_where_they_came_from_without_solving_again() -> None:
    graph = backward()
    assert not {"L0.SC.m0.B", "L0.SN.m0.B", "L0.SP.m0.B", "L0.SH.m0.B"} & set(names(graph))
    home = reads(graph, "L1.SM.m0.B")
    assert {role: home[role] for role in ("d_residual", "d_weights", "d_shared", "homes")} == {
        "d_residual": "L1.U.m0.B",
        "d_weights": "L1.U.m0.B",
        "d_shared": "L1.U.m0.B",
        "homes": "L1.SH.m0.F",
    }
    assert reads(graph, "L1.AT.m0.B")["d_residual"] == "L1.SM.m0.B"
    assert reads(graph, "L1.S.m0.B")["d_shared"] == "L1.SM.m0.B"
    assert reads(graph, "L1.C.m0.c0.B")["route"] == "L1.SH.m0.F"
    assert reads(graph, "L1.D.m0.c0.B")["route"] == "L1.SN.m0.F"


def test_a_chunk_leaves_while_the_next_is_computed() -> None:
    shape = StepShape(moe_layers=(True,), moves_samples=True, chunks=2, microbatches=2)
    order = [name for name in names(build_graph(shape)) if ".m0." in name]
    forward = [name for name in order if name.endswith("F") and name.split(".")[1] in ("X", "RO")]
    assert forward == ["L0.X.m0.c0.F", "L0.RO.m0.c0.F", "L0.X.m0.c1.F", "L0.RO.m0.c1.F"]
    names_of_all = names(build_graph(shape))
    counted = [names_of_all.index(f"L0.{op}.m{m}.F") for m in (0, 1) for op in ("AT", "SC")]
    assert counted == sorted(counted), "a microbatch is counted before attention of the next"


@pytest.mark.parametrize("form", ["s1", "s2", "baseline"])
def test_rows_that_several_ranks_have_or_sums_of_them_are_refused(form: ExpertForm) -> None:
    sharing = Sharing(tp_size=2, etp_size=2)
    shape = StepShape(moe_layers=(True,), moves_samples=True, sharing=sharing, expert_form=form)
    with pytest.raises(
        ScheduleError, match=f"placement.samples = netmoe: with expert_form = {form} ranks send rows"
    ):
        build_graph(shape)


def test_where_ranks_share_experts_all_of_them_know_all_rows() -> None:
    shape = StepShape(moe_layers=(True,), moves_samples=True, sharing=Sharing(tp_size=2, etp_size=2))
    graph = build_graph(shape)
    met = {op: task_at(graph, f"L0.{op}.m0.F").axes for op in ("SN", "SH", "SM")}
    assert met == {"SN": Group.EXPERT_SHARDS, "SH": Group.EXPERT_SHARDS, "SM": Group.EXPERT}
    assert reads(graph, "L0.RO.m0.c0.F")["rows"] == "L0.XS.m0.c0.F"
    for op in ("HV", "HL"):
        assert reads(graph, f"L0.{op}.m0.F")["metadata"] == "L0.SM.m0.F"


@pytest.mark.parametrize("tokens", ["split", "replicated"])
def test_who_asks_the_next_gate_waits_for_the_parameters_of_that_gate(tokens: TokenLayout) -> None:
    """Of ranks that share attention they are partial, and gathered by tasks of their own."""
    sharing = Sharing(tp_size=2, etp_size=2, tokens=tokens)
    updating = Updating(clips=True, edp=True)
    shape = StepShape(moe_layers=(True, True), moves_samples=True, sharing=sharing, updating=updating)
    graph = build_graph(shape)
    counts, gate = task_at(graph, "L0.SC.m0.F"), task_at(graph, "L1.GT.m0.F")
    assert counts.reads == gate.reads
    gathers = {task for task in graph.tasks if task.forward and set(task.writes) & set(gate.reads)}
    assert gathers and gathers <= ancestors(graph, counts)


@pytest.mark.parametrize(("tp_size", "etp_size"), [(3, 2), (2, 3), (4, 6)])
def test_shards_in_which_ranks_with_the_same_samples_differ_are_refused(tp_size: int, etp_size: int) -> None:
    sharing = Sharing(tp_size=tp_size, etp_size=etp_size)
    with pytest.raises(RefusalError, match=f"parallel.etp_size={etp_size} neither divides"):
        build_graph(StepShape(moe_layers=(True,), sharing=sharing, moves_samples=True))


def test_a_fixed_number_of_slots_is_refused() -> None:
    graph = PlainStep(moe_layers=(False, True), exchange_counts=False).graph()
    with pytest.raises(ScheduleError, match="layer 1 has a fixed number of rows"):
        MoveSamples()(graph)


# ---- rows that bring the residual --------------------------------------------------------------------------


UNPACKED = MoveSamples()(PlainStep(moe_layers=(True, True), shared_experts=True).graph())
PACKED = PackedResidualPass()(UNPACKED).check()


def test_the_picture_of_packed_rows_is_true() -> None:
    earlier, later = map(edges, picture(PackedResidualPass))
    assert all(holds(UNPACKED, edge, layer=1) for edge in earlier)
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
