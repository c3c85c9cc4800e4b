"""A pass that loses a gradient or a sum over ranks is refused by name: both would train, and wrongly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock.features.build import build_graph
from penstock.graph import Cut, Graph, ScheduleError
from penstock.graph.task import Inputs
from penstock.mesh import Group
from penstock.step import Stage, StepShape
from penstock.step.rewrite import changed
from tests.step.support import Rewriting
from tests.steps import SHARED, task_at

SHAPE = StepShape(moe_layers=(True, True), microbatches=2, shared_experts=True, pieces={"replicated": (2, 2)})


def without(name: str) -> Callable[[Graph], Graph]:
    """Take a task away."""
    return lambda graph: Graph.of(task for task in graph.tasks if str(task) != name)


def reading(name: str, change: Callable[[Inputs], Inputs]) -> Callable[[Graph], Graph]:
    """Change what a task reads."""
    return lambda graph: Graph.of(
        task.reading(change(task.inputs)) if str(task) == name else task for task in graph.tasks
    )


def unread(name: str, role: str) -> Callable[[Graph], Graph]:
    """Take all edges of one role away from a task."""
    return reading(name, lambda inputs: {each: inputs[each] for each in inputs if each != role})


def first_of(name: str, role: str) -> Callable[[Graph], Graph]:
    """Leave a task one edge of a role."""
    return reading(name, lambda inputs: {**inputs, role: inputs[role][:1]})


def of_layer_1(op: str, **changes: Any) -> Callable[[Graph], Graph]:
    """Change the reductions of one kind in layer 1."""
    return lambda graph: changed(graph, (op,), lambda task: replace(task, **changes) if task.layer else task)


LOST: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "reduction": (
        without("L1.AR.p1.B"),
        "gradients of L1 are not reduced over the ranks, or not all of them: no AR of layer 1",
    ),
    "part of a buffer": (of_layer_1("AR", cut=Cut(parts=(1,) * 4)), "no AR of layer 1 writes that piece"),
    "ranks": (
        of_layer_1("AR", axes=Group.NODE),
        "L1.AR.p0.B sums over ep_local, and gradients of that kind are summed over dp x tp",
    ),
    "shared experts": (unread("L0.AT.m1.B", "d_tokens"), "nobody reads d_tokens of L0.S.m1.B"),
    "weights": (
        unread("L1.AT.m0.B", "d_weights"),
        "nobody reads d_weights of L1.U.m0.B: the gradient is lost",
    ),
    "embedding": (unread("L0.EM.m1.B", "d_hidden"), "nobody reads d_hidden of L0.AT.m1.B"),
    "loss": (first_of("L1.ST.F", "loss"), "L1.HD.m1.B reads d_loss of L1.ST.F, which does not sum its loss"),
    "slope of the loss": (
        unread("L1.HD.m1.B", "d_loss"),
        "no backward task of L1.HD.m1.F reads d_loss of L1.ST.F: the gradient is lost",
    ),
}
"""What a pass may lose, and what is said of it."""


LOST_BY_SHARING: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "partial gradients": (
        without("L1.PR.p0.B"),
        "partial gradients of L1 are not reduced over the ranks, or not all of them: no PR of layer 1",
    ),
    "gradients of shards": (without("L0.AR.p1.B"), "gradients of L0 are not reduced over the ranks"),
    "ranks of partial gradients": (
        of_layer_1("PR", axes=Group.DATA),
        "L1.PR.p0.B sums over dp, and gradients of that kind are summed over dp x tp",
    ),
    "attention": (unread("L1.TG.m0.B", "d_hidden"), "nobody reads d_hidden of L1.TA.m0.B"),
    "residual": (first_of("L0.ES.m1.B", "d_hidden"), "nobody reads d_hidden of L0.GT.m1.B"),
    "shards": (unread("L0.X.m1.c0.B", "d_rows"), "nobody reads d_rows of L0.XS.m1.c0.B"),
    "logits": (unread("L1.HV.m0.B", "d_logits"), "nobody reads d_logits of L1.HL.m0.B"),
}
"""The same of ranks that share attention and experts."""


@pytest.mark.parametrize("lost", [*LOST, *LOST_BY_SHARING])
def test_what_a_pass_must_not_lose(lost: str) -> None:
    rewrite, why = (LOST | LOST_BY_SHARING)[lost]
    stage = Stage.WEIGHTS if "reads d_" in why else Stage.SETTLE
    shape = replace(SHAPE, more=(Rewriting("losing", stage, rewrite),))
    with pytest.raises(ScheduleError, match=re.escape(why)):
        build_graph(shape if lost in LOST else replace(shape, sharing=SHARED))


@pytest.mark.parametrize("chunks", [(1, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("split_experts", [False, True])
def test_a_pass_that_loses_nothing(chunks: tuple[int, int], split_experts: bool) -> None:
    forward, backward = chunks
    shape = replace(SHAPE, chunks=forward, degree_backward=backward, split_experts=split_experts)
    same = Rewriting("same", Stage.SETTLE, lambda graph: graph)
    assert build_graph(replace(shape, more=(same,))).text() == build_graph(shape).text()


def test_another_reader_leaves_a_task_the_state_that_it_touches() -> None:
    task = task_at(build_graph(SHAPE), "L1.AR.p0.B")
    other = task.reading({})
    assert task.writes and not other.inputs
    assert (other.writes, other.reads, other.cut) == (task.writes, task.reads, task.cut)


@dataclass
class Changing:
    """A pass that can be changed, so nothing can be kept by it."""

    name: str = "changing"
    stage: Stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        return graph


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (Changing(), "pass changing cannot be hashed"),
        ("chunks", "'chunks' is no pass: it needs a name, a stage of Stage, and to be called with a graph"),
        (Rewriting("empty", Stage.INSERT, lambda graph: None), "pass empty returned NoneType"),  # type: ignore[arg-type,return-value]
    ],
)
def test_what_is_no_pass_is_refused(own: object, why: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(why)):
        build_graph(replace(SHAPE, more=(own,)))  # type: ignore[arg-type]
