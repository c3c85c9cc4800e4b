"""Builds the graph of one iteration from its shape: the plain step, rewritten by passes."""

from __future__ import annotations

from functools import lru_cache

from penstock.features.table import FEATURES
from penstock.graph import Graph, RefusalError
from penstock.ops.core import GRADIENT_KINDS
from penstock.step.passes import (
    Chunks,
    GatheredLoads,
    GradientPieces,
    Microbatches,
    Settle,
    Transpose,
    WeightGradients,
    check_complete,
)
from penstock.step.plain import PlainStep
from penstock.step.rewrite import Pass, Stage, in_order, run
from penstock.step.shape import StepShape


def passes_of(shape: StepShape) -> tuple[Pass, ...]:
    """Return the passes that a shape asks for.

    Raises:
        RefusalError: Where a feature cannot be had.
    """
    for feature in FEATURES:
        if why := feature.why_not(shape):
            raise RefusalError(why)
    of_features = [each for feature in FEATURES for each in feature.passes(shape)]
    cut: list[Pass] = []
    if shape.microbatches > 1:
        cut.append(Microbatches(shape.microbatches))
    if max(shape.chunks, shape.backward_chunks) > 1:
        cut.append(Chunks(shape.chunks, shape.backward_chunks))
    if any(shape.moe_layers):
        cut += [WeightGradients()] if shape.split_experts else []
        apart = shape.gathers_loads and not shape.replica_slots  # replicas bring the pass themselves
        cut += [GatheredLoads()] if apart else []
    layers = range(shape.num_layers)
    parts = {kind: [shape.parts_of(layer, kind) for layer in layers] for kind in GRADIENT_KINDS}
    pieces = GradientPieces(parts, shape.sharing.tp_size > 1, scatters=shape.updating is not None)
    return in_order((Transpose(), *cut, *of_features, pieces, Settle()))


SMALL = 400
"""Pieces of a step, about a third of its tasks, up to which very many of its graphs are kept."""


def build_graph(shape: StepShape) -> Graph:
    """Build the checked graph of a step; cached, so that orders of one cut share a graph.

    Graphs of small steps are kept for longer: searches on other clusters, or of other effort, ask for the
    same cuts of a few layers.

    Raises:
        ScheduleError: For two passes of one name, an edge to nothing, a cycle, state that is read before it
            is complete, or a gradient that a pass of one's own has lost.
    """
    pieces = shape.num_layers * shape.microbatches * shape.slices
    pieces += sum(map(sum, shape.pieces.values()))
    return _small_graph(shape) if pieces <= SMALL else _large_graph(shape)


def _built(shape: StepShape) -> Graph:
    plain = PlainStep(
        moe_layers=shape.moe_layers,
        exchange_counts=shape.exchange_counts,
        shared_experts=shape.shared_experts,
    )
    passes = in_order(passes_of(shape), shape.more)
    early = tuple(each for each in passes if each.stage < Stage.GRADIENTS)
    graph = run(_rewritten(plain, early), passes[len(early) :]).check()
    if shape.more:
        check_complete(graph, shape)
    return graph


_small_graph = lru_cache(maxsize=1024)(_built)
_large_graph = lru_cache(maxsize=8)(_built)


@lru_cache(maxsize=128)
def _rewritten(plain: PlainStep, passes: tuple[Pass, ...]) -> Graph:
    """Return the plain step rewritten by passes before the reductions. Cached: a search tries each step with
    many sizes of gradient pieces, and many numbers of chunks in a step that is alike up to there."""
    return run(_rewritten(plain, passes[:-1]), passes[-1:]) if passes else plain.graph()
