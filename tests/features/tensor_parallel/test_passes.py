"""Attention, dense blocks and vocabulary on ranks that share them, with tokens split and replicated."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.features.tensor_parallel.feature import TensorParallel
from penstock.graph import Graph, Lane, Phase
from penstock.mesh import Group
from penstock.ops import Kind, spec_of
from penstock.step.passes import Transpose
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import check_picture
from tests.step.support import reads
from tests.steps import task_at

RANKS = 2
PLAIN = PlainStep(moe_layers=(True, False, True), shared_experts=True).graph()
LAYOUTS = [(True, True), (True, False), (False, True), (False, False)]
"""Whether tokens are split between blocks, and inside an MoE part."""


def rewritten(*, split: bool, moe_split: bool, graph: Graph = PLAIN) -> Graph:
    return TensorParallel(RANKS, split, moe_split)(graph).check()


def forward(graph: Graph, layer: int) -> list[str]:
    """The ops of a layer in program order."""
    return [task.op for task in graph.tasks if task.layer == layer and task.forward]


def test_the_picture_is_true() -> None:
    plain = PlainStep(moe_layers=(True,)).graph()
    check_picture(TensorParallel, plain, rewritten(split=True, moe_split=True, graph=plain), layer=0)


@pytest.mark.parametrize(("split", "moe_split"), LAYOUTS)
def test_the_tasks_of_every_kind_of_layer(split: bool, moe_split: bool) -> None:
    graph = rewritten(split=split, moe_split=moe_split)
    gather, scatter = ("TG", "TS") if split else ("TC", "TR")
    wide = ["FN", "FG", "FF", "FS", "FA"] if split else ["FN", "FC", "FF", "FR", "FA"]
    before = {(True, False): ["MG"], (False, True): ["MS"]}.get((split, moe_split), [])
    after = {(True, False): ["US"], (False, True): ["UG"]}.get((split, moe_split), [])
    inside = ["TA", "TS" if moe_split else "TR", "GT", "N", "D", "S", "X", "C", "U"]
    first = ["EM", "ES" if split else "ER", gather, *before, *inside, *after]
    assert forward(graph, 0) == first
    assert forward(graph, 1) == [gather, "TA", scatter, *wide]
    assert forward(graph, 2) == [*first[2:], "HG" if split else "HC", "HV", "HX", "HL", "ST"]


@pytest.mark.parametrize(("split", "moe_split"), LAYOUTS)
def test_hidden_states_flow_through_all_of_it_and_gradients_back(split: bool, moe_split: bool) -> None:
    graph = Transpose()(rewritten(split=split, moe_split=moe_split)).check()
    gather, scatter = ("TG", "TS") if split else ("TC", "TR")
    wide = ("FG", "FS") if split else ("FC", "FR")
    chain = [("TA", gather, "hidden"), (scatter, "TA", "attended"), ("FN", scatter, "attended")]
    chain += [(wide[0], "FN", "tokens"), ("FF", wide[0], "tokens"), (wide[1], "FF", "out")]
    for reader, read, role in [*chain, ("FA", wide[1], "out"), ("FA", "FN", "residual")]:
        assert reads(graph, f"L1.{reader}.m0.F")[role] == f"L1.{read}.m0.F"
        assert f"L1.{reader}.m0.B" in reads(graph, f"L1.{read}.m0.B")[f"d_{role}"].split()
    hidden = reads(graph, "L1.FN.m0.F")["hidden"]  # the block's own input, not what was gathered of it
    assert hidden == reads(graph, f"L1.{gather}.m0.F")["hidden"]
    assert reads(graph, f"L2.{gather}.m0.F")["hidden"] == "L1.FA.m0.F"


@pytest.mark.parametrize(("split", "moe_split"), LAYOUTS)
def test_the_router_reads_tokens_as_the_moe_part_has_them(split: bool, moe_split: bool) -> None:
    graph = Transpose()(rewritten(split=split, moe_split=moe_split)).check()
    start = "L0.ES.m0.F" if split else "L0.ER.m0.F"
    converted = {(True, False): "L0.MG.m0.F", (False, True): "L0.MS.m0.F"}.get((split, moe_split))
    assert reads(graph, "L0.GT.m0.F")["hidden"] == converted or start
    if split and not moe_split:  # attention has gathered them; the gradient has its own way, and is no sum
        assert reads(graph, "L0.MG.m0.F") == {"hidden": start, "gathered": "L0.TG.m0.F"}
        assert "L0.MG.m0.B" in reads(graph, "L0.ES.m0.B")["d_hidden"].split()
        assert "MG" not in str(reads(graph, "L0.TG.m0.B"))
    end = {(True, False): "L0.US.m0.F", (False, True): "L0.UG.m0.F"}.get((split, moe_split), "L0.U.m0.F")
    assert reads(graph, "L1.TG.m0.F" if split else "L1.TC.m0.F")["hidden"] == end
    for role in ("rows", "route", "residual", "weights", "order", "tokens"):  # all came from AT
        read = {names for task in graph.tasks if task.layer == 0 for names in task.inputs.get(role, ())}
        assert all(name.op != "AT" for name in read)


@pytest.mark.parametrize(("split", "moe_split"), LAYOUTS)
def test_transfers_meet_the_ranks_that_share_attention_inside_their_node(
    split: bool, moe_split: bool
) -> None:
    graph = Transpose()(rewritten(split=split, moe_split=moe_split)).check()
    added = [task for task in graph.tasks if task.lane is Lane.INTRA]
    assert added and {task.axes for task in added} == {Group.TENSOR}
    assert {spec_of(task.op).kind for task in added} == {Kind.COLLECTIVE}


@pytest.mark.parametrize(("split", "moe_split"), LAYOUTS)
def test_who_has_a_part_of_the_tokens(split: bool, moe_split: bool) -> None:
    graph = rewritten(split=split, moe_split=moe_split)
    for task in graph.tasks:
        part = task.cut.token_shards == RANKS
        if task.op in ("GT", "N", "D", "S", "X", "C", "U"):
            assert part is moe_split, task
        elif task.op in ("FN", "FA"):
            assert part is split, task
        elif task.op in ("EM", "TG", "TC", "TA", "FF", "FG", "HG", "HV", "HX", "HL", "ST"):
            assert not part, task


def added_to(graph: Graph, name: str) -> set[str]:
    """The kinds of gradients that a task adds to."""
    return {state.partition(" of ")[0] for state in task_at(graph, name).accumulates}


@pytest.mark.parametrize(("split", "moe_split"), LAYOUTS)
def test_gradients_are_partial_where_a_rank_sees_a_part(split: bool, moe_split: bool) -> None:
    graph = Transpose()(rewritten(split=split, moe_split=moe_split)).check()
    both, whole, part = {"gradients", "partial gradients"}, {"gradients"}, {"partial gradients"}
    assert added_to(graph, "L0.EM.m0.B") == both  # vocabulary, and positions, which one rank adds
    assert added_to(graph, "L1.TA.m0.B") == both  # this rank's heads, and the norm before all of them
    assert added_to(graph, "L2.HV.m0.B") == both
    assert added_to(graph, "L1.FF.m0.B") == both  # this rank's part, and a bias, which one rank adds
    assert added_to(graph, "L1.FN.m0.B") == (part if split else whole)
    for op in ("GT", "S"):
        assert added_to(graph, f"L0.{op}.m0.B") == (part if moe_split else whole)
    assert added_to(graph, "L0.X.m0.c0.B") == {"expert gradients"}


def test_what_knows_the_peaks_of_all_shards_makes_their_gradient_alone() -> None:
    graph = Transpose()(rewritten(split=True, moe_split=True)).check()
    assert not [task for task in graph.tasks if task.op == "HX" and task.phase is Phase.BACKWARD]
    assert reads(graph, "L2.HV.m0.B") == {"d_logits": "L2.HL.m0.B", "saved": "L2.HV.m0.F"}
    backward = [task for task in graph.tasks if task.layer == 2 and not task.forward]
    assert [first.op for first, _ in pairwise(backward)][:3] == ["HL", "HV", "HG"]
