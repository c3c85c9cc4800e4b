"""Slices of two transfers that run at the same time: what is cut, and what stays whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.features.expert_sharding.feature import SimultaneousPair
from penstock.graph import Graph, Phase, ScheduleError, Task
from penstock.step import Sharing, StepShape
from penstock.step.passes import Chunks
from tests.step.passes.pictures import check_picture
from tests.step.support import needs
from tests.steps import SHARED

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


def test_a_slice_is_gathered_when_it_has_come_and_waits_for_no_other() -> None:
    graph = paired(3)
    for i in range(3):
        assert needs(graph, f"L2.SG.m0.c{i}.F") == {f"L2.C.m0.c{i}.F", "L2.N.m0.F"}
        assert needs(graph, f"L2.SD.m0.c{i}.B") == {f"L2.D.m0.c{i}.B", "L2.N.m0.F"}
    assert {f"L2.SG.m0.c{i}.F" for i in range(3)} < needs(graph, "L2.U.m0.F")
    assert needs(graph, "L2.C.m0.c0.B") == {"L2.SG.m0.c0.B", "L2.N.m0.F"}


def test_without_a_pair_there_is_nothing_to_cut() -> None:
    once = build_graph(WHOLE)
    assert {task.chunk for task in once.tasks} == {None, 0}
    assert {task.cut.slices for task in once.tasks} == {1}


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
