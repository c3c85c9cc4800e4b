"""Passes run in the order of their stages, each once, and errors say which one failed."""

from __future__ import annotations

from itertools import permutations

import pytest

from penstock.features.build import build_graph, passes_of
from penstock.graph import Graph, ScheduleError
from penstock.step import Pass, Stage, StepShape
from penstock.step.passes import Chunks, Microbatches, Transpose, WeightGradients
from penstock.step.plain import PlainStep
from penstock.step.rewrite import in_order, run
from tests.step.support import Rewriting

PLAIN = PlainStep(moe_layers=(True,)).graph()


def noting(name: str, stage: Stage, ran: list[str]) -> Rewriting:
    def rewrite(graph: Graph) -> Graph:
        ran.append(name)
        return graph

    return Rewriting(name, stage, rewrite)


def test_stages_are_in_the_order_that_passes_need() -> None:
    assert [stage.name for stage in sorted(Stage)] == [
        "INSERT", "TRANSPOSE", "MICROBATCHES", "CHUNKS", "SLICES", "WEIGHTS", "GRADIENTS", "UPDATES",
        "SETTLE",
    ]  # fmt: skip


def test_passes_run_by_stage_and_inside_a_stage_as_they_are_given() -> None:
    ran: list[str] = []
    given = [
        noting("last", Stage.SETTLE, ran),
        noting("b", Stage.INSERT, ran),
        noting("middle", Stage.CHUNKS, ran),
        noting("a", Stage.INSERT, ran),
    ]
    assert run(PLAIN, in_order(given)) is PLAIN
    assert ran == ["b", "a", "middle", "last"]


def test_in_whatever_order_passes_are_given_the_step_is_the_same() -> None:
    passes: tuple[Pass, ...] = (Transpose(), Microbatches(2), Chunks(2, 3), WeightGradients())
    first, *others = (run(PLAIN, in_order(given)).text() for given in permutations(passes))
    assert all(other == first for other in others)


def test_a_pass_that_stands_twice_is_refused() -> None:
    """Two systems that both cut microbatches would cut them twice."""
    with pytest.raises(ScheduleError, match=r"^pass microbatches stands twice: systems combine each"):
        in_order([Microbatches(2), Transpose(), Microbatches(3)])
    with pytest.raises(ScheduleError, match="pass chunks stands twice"):
        build_graph(StepShape(moe_layers=(True,), chunks=2, more=(Chunks(2, 2),)))


def test_an_error_names_its_pass() -> None:
    passes: list[Pass] = [Microbatches(2), Rewriting("weight_gradients", Stage.WEIGHTS, _without_backward)]
    with pytest.raises(ScheduleError, match=r"^pass weight_gradients: layer 0 has no backward") as caught:
        run(PLAIN, passes)
    assert isinstance(caught.value.__cause__, ScheduleError)


def _without_backward(graph: Graph) -> Graph:
    del graph
    raise ScheduleError("layer 0 has no backward")


def test_other_errors_stay_what_they_are() -> None:
    def broken(graph: Graph) -> Graph:
        raise ValueError(graph)

    with pytest.raises(ValueError):  # the pass has raised it
        run(PLAIN, [Rewriting("broken", Stage.INSERT, broken)])


def test_a_pass_of_one_s_own_runs_where_its_stage_says() -> None:
    """`more` of a shape: here between the cut of the batch and that of the layers."""
    seen: list[set[int | None]] = []

    def look(graph: Graph) -> Graph:
        seen.append({task.chunk for task in graph.tasks if task.op == "X"})
        assert {task.microbatch for task in graph.tasks if task.op == "X"} == {0, 1}
        return graph

    own = (Rewriting("look", Stage.MICROBATCHES, look), Rewriting("look again", Stage.SLICES, look))
    build_graph(StepShape(moe_layers=(True,), microbatches=2, chunks=2, more=own))
    assert seen == [{0}, {0, 1}]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (StepShape(moe_layers=(True,)), ["transpose", "gradient_pieces", "settle"]),
        (
            StepShape(moe_layers=(True,), microbatches=2, degree_backward=2, split_experts=True),
            ["transpose", "microbatches", "chunks", "weight_gradients", "gradient_pieces", "settle"],
        ),
        (StepShape(moe_layers=(False,), split_experts=True), ["transpose", "gradient_pieces", "settle"]),
    ],
)
def test_a_shape_asks_for_the_passes_that_it_needs(shape: StepShape, expected: list[str]) -> None:
    assert [each.name for each in passes_of(shape)] == expected
    assert passes_of(shape) == passes_of(shape), "passes can be compared, and so can plans"
