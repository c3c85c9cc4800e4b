"""A pass that loses a gradient or a sum over ranks is refused by name: both would train, and wrongly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from penstock.features.build import build_graph
from penstock.graph import Graph, Name, ScheduleError, Task
from penstock.mesh import Group
from penstock.step import Stage, StepShape
from tests.step.support import Rewriting
from tests.steps import SHARED, task_at

SHAPE = StepShape(moe_layers=(True, True), microbatches=2, shared_experts=True, pieces={"replicated": (2, 2)})


def without(name: str) -> Callable[[Graph], Graph]:
    """Take a task away."""
    return lambda graph: Graph.of(task for task in graph.tasks if str(task) != name)


def unread(name: str, role: str) -> Callable[[Graph], Graph]:
    """Take all edges of one role away from a task."""

    def rewrite(graph: Graph) -> Graph:
        return Graph.of(
            task if str(task) != name else task.reading(_less(task, role)) for task in graph.tasks
        )

    return rewrite


def _less(task: Task, role: str) -> dict[str, tuple[Name, ...]]:
    assert role in task.inputs, task.text
    return {each: names for each, names in task.inputs.items() if each != role}


def first_of(name: str, role: str) -> Callable[[Graph], Graph]:
    """Leave a task one edge of a role."""

    def rewrite(graph: Graph) -> Graph:
        return Graph.of(
            task if str(task) != name else task.reading({**task.inputs, role: task.inputs[role][:1]})
            for task in graph.tasks
        )

    return rewrite


def halved(graph: Graph) -> Graph:
    """Cut the buffer of layer 1 in four, and reduce the first two."""
    return Graph.of(
        replace(task, cut=replace(task.cut, parts=(1, 1, 1, 1))) if task.op == "AR" and task.layer else task
        for task in graph.tasks
    )


def inside_nodes(graph: Graph) -> Graph:
    """Sum the gradients of layer 1 over the ranks of a node only."""
    return Graph.of(
        replace(task, axes=Group.NODE) if task.op == "AR" and task.layer else task for task in graph.tasks
    )


LOST: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "reduction": (
        without("L1.AR.p1.B"),
        "gradients of L1 are not reduced over the ranks, or not all of them: no AR of layer 1",
    ),
    "part of a buffer": (halved, "no AR of layer 1 writes that piece"),
    "ranks": (
        inside_nodes,
        "L1.AR.p0.B sums over ep_local, and gradients of that kind are summed over dp x tp",
    ),
    "shared experts": (unread("L0.AT.m1.B", "d_tokens"), "nobody reads d_tokens of L0.S.m1.B"),
    "weights": (
        unread("L1.AT.m0.B", "d_weights"),
        "nobody reads d_weights of L1.U.m0.B: the gradient is lost",
    ),
    "embedding": (unread("L0.EM.m1.B", "d_hidden"), "nobody reads d_hidden of L0.AT.m1.B"),
    "loss": (first_of("L1.ST.F", "loss"), "L1.HD.m1.B reads d_loss of L1.ST.F, which does not sum its loss"),
}
"""What a pass may lose, and what is said of it."""


@pytest.mark.parametrize("lost", LOST)
def test_what_a_pass_must_not_lose(lost: str) -> None:
    rewrite, why = LOST[lost]
    stage = Stage.SETTLE if "AR" in why else Stage.WEIGHTS
    with pytest.raises(ScheduleError, match=re.escape(why)):
        build_graph(replace(SHAPE, more=(Rewriting("losing", stage, rewrite),)))


SHARING = replace(SHAPE, sharing=SHARED)


def over_other_samples(graph: Graph) -> Graph:
    """Sum partial gradients of layer 1 as if every rank had all of them."""
    return Graph.of(
        replace(task, axes=Group.DATA) if task.op == "PR" and task.layer else task for task in graph.tasks
    )


LOST_BY_SHARING: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "partial gradients": (
        without("L1.PR.p0.B"),
        "partial gradients of L1 are not reduced over the ranks, or not all of them: no PR of layer 1",
    ),
    "gradients of shards": (without("L0.AR.p1.B"), "gradients of L0 are not reduced over the ranks"),
    "ranks of partial gradients": (
        over_other_samples,
        "L1.PR.p0.B sums over dp, and gradients of that kind are summed over dp x tp",
    ),
    "attention": (unread("L1.TG.m0.B", "d_hidden"), "nobody reads d_hidden of L1.TA.m0.B"),
    "residual": (first_of("L0.ES.m1.B", "d_hidden"), "nobody reads d_hidden of L0.GT.m1.B"),
    "shards": (unread("L0.X.m1.c0.B", "d_rows"), "nobody reads d_rows of L0.XS.m1.c0.B"),
    "logits": (unread("L1.HV.m0.B", "d_logits"), "nobody reads d_logits of L1.HL.m0.B"),
}
"""The same of ranks that share attention and experts."""


@pytest.mark.parametrize("lost", LOST_BY_SHARING)
def test_what_a_pass_must_not_lose_where_ranks_share(lost: str) -> None:
    rewrite, why = LOST_BY_SHARING[lost]
    stage = Stage.WEIGHTS if "nobody reads" in why else Stage.SETTLE
    with pytest.raises(ScheduleError, match=re.escape(why)):
        build_graph(replace(SHARING, more=(Rewriting("losing", stage, rewrite),)))


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
