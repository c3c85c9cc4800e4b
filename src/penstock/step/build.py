"""From a shape to the graph of one iteration: the plain step, rewritten by passes."""

from __future__ import annotations

from functools import lru_cache

from penstock.graph import Graph
from penstock.ops import Op
from penstock.ops.transfers import FLAT
from penstock.step.complete import check_complete
from penstock.step.passes import (
    Chunks,
    GradientPieces,
    Hierarchical,
    Microbatches,
    Settle,
    Transpose,
    WeightGradients,
)
from penstock.step.plain import PlainStep
from penstock.step.shape import StepShape
from penstock.step.stages import Pass, Stage, apply, in_order


def passes_of(shape: StepShape) -> tuple[Pass, ...]:
    """What a shape says, as passes."""
    found: list[Pass] = [Transpose()]
    if shape.dispatch != FLAT and any(shape.moe_layers):
        found.append(Hierarchical(shape.dispatch))
    if shape.microbatches > 1:
        found.append(Microbatches(shape.microbatches))
    if shape.slices > 1:
        found.append(Chunks(shape.chunks, shape.backward_chunks))
    if shape.split_experts and any(shape.moe_layers):
        found.append(WeightGradients())
    layers = range(shape.num_layers)
    replicated = [shape.parts_of(layer) for layer in layers]
    experts = [shape.parts_of(layer, Op.EXPERT_ALL_REDUCE) for layer in layers]
    found.append(GradientPieces(replicated, experts))
    found.append(Settle())
    return tuple(found)


@lru_cache(maxsize=8)
def build_graph(shape: StepShape) -> Graph:
    """The checked graph of a step. Orders of one cut share theirs.

    Raises ScheduleError for two passes of one name, an edge to nothing, a cycle, state that is read before it
    is complete, or a gradient that a pass of one's own has lost.
    """
    plain = PlainStep(
        moe_layers=shape.moe_layers,
        exchange_counts=shape.exchange_counts,
        shared_experts=shape.shared_experts,
    )
    passes = in_order((*passes_of(shape), *shape.more))
    early = tuple(each for each in passes if each.stage < Stage.GRADIENTS)
    graph = apply(_cut(plain, early), passes[len(early) :]).check()
    if shape.more:
        check_complete(graph, shape)
    return graph


@lru_cache(maxsize=64)
def _cut(plain: PlainStep, passes: tuple[Pass, ...]) -> Graph:
    """A step without reductions. A search tries each with many sizes of their pieces."""
    return apply(plain.graph(), passes)
