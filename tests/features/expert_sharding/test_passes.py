"""Rows on their way to all shards of their experts: four forms, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.features.dispatch.feature import Hierarchical
from penstock.features.expert_sharding.feature import (
    DealtSlots,
    FusedShards,
    GatheredShards,
    RepeatedRows,
    SimultaneousPair,
)
from penstock.graph import Graph, Lane, Phase, ScheduleError, Task
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.step import Pass, Sharing, StepShape
from penstock.step.passes import Chunks, Transpose
from penstock.step.plain import PlainStep
from penstock.step.shape import ExpertForm
from tests.step.passes.pictures import check_picture
from tests.step.support import check_chain, reads
from tests.steps import SHARED, task_at

PLAIN = PlainStep(moe_layers=(True, True)).graph()
SHARDS, RANKS = 3, 2

FORMS: dict[ExpertForm, tuple[Pass, ...]] = {
    "gather": (GatheredShards(SHARDS),),
    "s1": (FusedShards(SHARDS),),
    "s2": (DealtSlots(RANKS), FusedShards(SHARDS)),
    "baseline": (RepeatedRows(SHARDS),),
}
CHAINS: dict[ExpertForm, str] = {
    "gather": "D XG X XS C",
    "s1": "D X C",
    "s2": "SD D X C SG",
    "baseline": "BG D X BR C BS",
}
MEETS: dict[ExpertForm, dict[str, Axes]] = {
    "gather": {"D": Group.EXPERT, "XG": Group.SHARDS, "XS": Group.SHARDS, "C": Group.EXPERT},
    "s1": {"D": Group.EXPERT_SHARDS, "C": Group.EXPERT_SHARDS},
    "s2": {
        "SD": Group.TENSOR,
        "D": Group.EXPERT_SHARDS,
        "C": Group.EXPERT_SHARDS,
        "SG": Group.TENSOR,
    },
    "baseline": {
        "BG": Group.SHARDS,
        "D": Group.EXPERT,
        "BR": Group.SHARDS,
        "C": Group.EXPERT,
        "BS": Group.SHARDS,
    },
}
COPIED: dict[ExpertForm, set[str]] = {
    "gather": {"XG", "X", "XS"},
    "s1": {"D", "X", "C"},
    "s2": {"D", "X", "C"},
    "baseline": {"BG", "D", "X", "BR", "C", "BS"},
}
"""Tasks that have the rows of all shards, or send theirs to all of them."""


def rewritten(form: ExpertForm, graph: Graph = PLAIN) -> Graph:
    for each in FORMS[form]:
        graph = each(graph)
    return graph.check()


@pytest.mark.parametrize("each", [GatheredShards(SHARDS), DealtSlots(RANKS), RepeatedRows(SHARDS)])
def test_the_pictures_are_true(each: Pass) -> None:
    check_picture(type(each), PLAIN, each(PLAIN).check(), layer=1)


@pytest.mark.parametrize("form", FORMS)
def test_rows_go_from_task_to_task_and_gradients_the_same_way_back(form: ExpertForm) -> None:
    check_chain(Transpose()(rewritten(form)).check(), CHAINS[form].split())


@pytest.mark.parametrize("form", FORMS)
def test_who_meets_and_on_which_lane(form: ExpertForm) -> None:
    graph = Transpose()(rewritten(form)).check()
    for task in graph.tasks:
        if task.op in MEETS[form]:
            between = task.op in (Op.DISPATCH, Op.COMBINE)
            assert (task.axes, task.lane) == (MEETS[form][task.op], Lane.INTER if between else Lane.INTRA)
            assert reads(graph, str(task))["route"] == f"L{task.layer}.N.m0.F"
    # Shards hold parts of the same experts, so each must know what the others receive.
    assert task_at(graph, "L0.N.m0.F").axes == Group.EXPERT_SHARDS


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_all_shards_are_counted_where_they_are(form: ExpertForm) -> None:
    graph = Transpose()(rewritten(form))
    assert {task.op for task in graph.tasks if task.cut.row_copies == SHARDS} == COPIED[form]
    assert {task.cut.row_copies for task in graph.tasks} == {1, SHARDS}


def test_dealt_rows_are_one_rank_s_share_until_they_are_gathered() -> None:
    graph = Transpose()(rewritten("s2"))
    dealt = {task.op for task in graph.tasks if task.cut.token_shards == RANKS}
    assert dealt == {"SD", "D", "X", "C", "SG"}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "gather"])
@pytest.mark.parametrize("dispatch", ["hierarchical_1d", "hierarchical_2d"])
def test_legs_inside_nodes_do_not_go_with_one_all_to_all_to_all_shards(
    form: ExpertForm, dispatch: str
) -> None:
    legs = Hierarchical(DISPATCHES[dispatch].hops)(PLAIN)
    with pytest.raises(ScheduleError, match=r"\(.*DG.*\) goes with expert_form=gather"):
        rewritten(form, legs)


@pytest.mark.parametrize("dispatch", ["hierarchical_1d", "hierarchical_2d"])
def test_gathered_shards_stand_inside_of_the_legs(dispatch: str) -> None:
    graph = rewritten("gather", Hierarchical(DISPATCHES[dispatch].hops)(PLAIN))
    inside = "DS" if dispatch == "hierarchical_1d" else "D"
    assert reads(graph, "L0.XG.m0.c0.F")["rows"] == f"L0.{inside}.m0.c0.F"
    home = "CG" if dispatch == "hierarchical_1d" else "C"
    assert reads(graph, f"L0.{home}.m0.c0.F")["rows"] == "L0.XS.m0.c0.F"


@pytest.mark.parametrize(
    ("tp_size", "etp_size", "forms"),
    [
        (1, 1, ("gather",)),
        (2, 1, ("gather", "s2", "baseline")),
        (1, 2, ("gather", "s1", "baseline")),
        (2, 2, ("gather", "s1", "s2", "baseline")),
    ],
)
def test_the_forms_that_differ(tp_size: int, etp_size: int, forms: tuple[ExpertForm, ...]) -> None:
    """They give graphs of their own, and the others one of theirs: tokens as the form wants them anyway."""
    sharing = Sharing(tp_size=tp_size, etp_size=etp_size)
    assert sharing.forms == forms
    texts = {
        form: build_graph(StepShape(moe_layers=(True,), sharing=sharing, expert_form=form)).facts()
        for form in FORMS
    }
    assert len({texts[form] for form in forms}) == len(forms)
    if sharing.is_none:
        assert set(texts.values()) == {texts["gather"]}
    elif etp_size == 1:
        assert texts["s1"] == texts["gather"]
    elif tp_size == 1:
        assert texts["s2"] == texts["s1"]


# ---- pairs -------------------------------------------------------------------------------------------------


WHOLE = StepShape(moe_layers=(True, False, True), sharing=SHARED, expert_form="s2")
PAIR = {("C", Phase.FORWARD), ("SG", Phase.FORWARD), ("D", Phase.BACKWARD), ("SD", Phase.BACKWARD)}


def paired(count: int, microbatches: int = 1) -> Graph:
    return build_graph(replace(WHOLE, pair_slices=count, microbatches=microbatches))


def test_the_picture_is_true() -> None:
    check_picture(SimultaneousPair, build_graph(WHOLE), paired(2), layer=0)


@given(st.integers(2, 8), st.integers(1, 3))
def test_only_the_pair_is_cut(count: int, microbatches: int) -> None:
    graph = paired(count, microbatches)

    def chunks(task: Task) -> int:
        same = (task.layer, task.op, task.phase, task.microbatch)
        return sum((t.layer, t.op, t.phase, t.microbatch) == same for t in graph.tasks)

    for task in graph.tasks:
        if task.chunk is not None:
            cut = (task.op, task.phase) in PAIR
            assert chunks(task) == (count if cut else 1)
            assert list(task.cut.held) == ([task.chunk] if cut else list(range(count)))
    routed = [
        task for task in graph.tasks if task.layer != 1 and task.op in ("GT", "U", "N", "X", "SD", "SG")
    ]
    assert {task.cut.slices for task in routed} == {count}


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_form": "s1"},
        {"expert_form": "gather"},
        {"sharing": Sharing(etp_size=2)},
        {"chunks": 2},
        {"degree_backward": 3},
    ],
)
def test_a_pair_that_there_is_not_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ScheduleError, match="a simultaneous pair needs expert_form=s2, ranks that share"):
        replace(WHOLE, pair_slices=2, **changes)  # type: ignore[arg-type]


def test_a_pair_after_chunks_is_refused() -> None:
    graph = Chunks(2, 2)(build_graph(WHOLE))
    with pytest.raises(
        ScheduleError, match="a simultaneous pair is cut where nothing else is: set chunks to 1"
    ):
        SimultaneousPair(2)(graph)
