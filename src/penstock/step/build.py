"""Builds the graph of one iteration from its shape: the plain step, rewritten by passes."""

from __future__ import annotations

from functools import lru_cache

from penstock.graph import Graph, RefusalError
from penstock.mesh import Group
from penstock.ops.sums import REDUCTIONS
from penstock.ops.transfers import FLAT
from penstock.step.complete import check_complete
from penstock.step.passes import (
    Chunks,
    DealtSlots,
    FusedShards,
    GatheredLoads,
    GatheredShards,
    GradientPieces,
    GradientRoom,
    Hierarchical,
    Microbatches,
    PackedResidualPass,
    PlannedReplicas,
    Recompute,
    RepeatedRows,
    ReplicaGradients,
    Replicas,
    SampleMoves,
    Settle,
    ShardedOptimizer,
    SimultaneousPair,
    TensorParallel,
    Transpose,
    WeightGradients,
)
from penstock.step.plain import PlainStep
from penstock.step.shape import FORM_TOKENS, StepShape
from penstock.step.stages import Pass, Stage, apply, in_order


def passes_of(shape: StepShape) -> tuple[Pass, ...]:
    """Return the passes that a shape asks for. Raises RefusalError where samples or experts cannot move."""
    _check_moves(shape)
    found: list[Pass] = [Transpose()]
    if shape.recompute != "none":
        found.append(Recompute(experts_only=shape.recompute == "experts"))
    if shape.moves_samples and any(shape.moe_layers):
        found.append(SampleMoves(Group.EXPERT_SHARDS if shape.sharing.etp_size > 1 else Group.EXPERT))
        if shape.packed_residual:
            found.append(PackedResidualPass())
    if shape.dispatch != FLAT and any(shape.moe_layers):
        found.append(Hierarchical(shape.dispatch))
    found += _sharing_passes(shape)
    if shape.replica_slots and any(shape.moe_layers):
        found += [Replicas(shape.replica_pieces), ReplicaGradients(shape.replica_pieces)]
    if shape.microbatches > 1:
        found.append(Microbatches(shape.microbatches))
    if max(shape.chunks, shape.backward_chunks) > 1:
        found.append(Chunks(shape.chunks, shape.backward_chunks))
    if shape.split_experts and any(shape.moe_layers):
        found.append(WeightGradients())
    if shape.gathers_loads and any(shape.moe_layers):
        found.append(GatheredLoads())
        if shape.replica_slots:
            shards = shape.sharing.etp_size > 1
            found.append(PlannedReplicas(Group.EXPERT_SHARDS if shards else Group.EXPERT))
    parts = {op: [shape.parts_of(layer, op) for layer in range(shape.num_layers)] for op in REDUCTIONS}
    updating = shape.updating
    found.append(GradientPieces(parts, shape.sharing.tp_size > 1, scatters=updating is not None))
    if updating is not None:
        found.append(ShardedOptimizer(updating.clips, updating.edp))
        if updating.releases:
            found.append(GradientRoom(updating.edp))
    found.append(Settle())
    return tuple(found)


def _check_moves(shape: StepShape) -> None:
    if not any(shape.moe_layers):
        return
    if shape.moves_samples and not shape.sharing.is_none and shape.expert_form != "gather":
        raise RefusalError(
            f"moves_samples: with expert_form = {shape.expert_form} ranks send rows of samples that others "
            "have, too, or sums of them, and a sample's rows are not one rank's to order. Use "
            "expert_form=gather, or let samples stay"
        )
    if shape.moves_samples and (why := shape.sharing.why_samples_stay):
        raise RefusalError(f"moves_samples: {why}. Use other sizes, or set placement.samples=none")
    if shape.replica_slots and not shape.exchange_counts:
        raise RefusalError(
            "replica_slots: every expert has a fixed number of rows from every rank, whoever computes them, "
            "so replicas would spare nothing. Use dropless routing, or set placement.experts=none"
        )


def _sharing_passes(shape: StepShape) -> list[Pass]:
    """Return the passes for ranks that share attention or experts."""
    sharing, form = shape.sharing, shape.expert_form
    found: list[Pass] = []
    if sharing.tp_size > 1:
        split, moe_split = sharing.tokens == "split", FORM_TOKENS[form] == "split"
        by_sample, differ = sharing.judges_samples, shape.copies_differ
        found.append(TensorParallel(sharing.tp_size, split, moe_split, by_sample, differ))
    if not any(shape.moe_layers) or sharing.is_none:
        return found
    if form == "baseline":
        return [*found, RepeatedRows(sharing.etp_size)]
    if form == "s2" and sharing.tp_size > 1:
        found.append(DealtSlots(sharing.tp_size))
        if shape.pair_slices > 1:
            found.append(SimultaneousPair(shape.pair_slices))
    if sharing.etp_size > 1:
        shards = GatheredShards if form == "gather" else FusedShards
        found.append(shards(sharing.etp_size))
    return found


SMALL = 400
"""Pieces of a step, about a third of its tasks, up to which very many of its graphs are kept."""


def build_graph(shape: StepShape) -> Graph:
    """Build the checked graph of a step; cached, so that orders of one cut share a graph.

    Graphs of small steps are kept for longer: searches on other clusters, or of other effort, ask for the
    same cuts of a few layers. Raises ScheduleError for two passes of one name, an edge to nothing, a cycle,
    state that is read before it is complete, or a gradient that a pass of one's own has lost.
    """
    pieces = shape.num_layers * shape.microbatches * shape.slices
    pieces += sum(map(sum, (shape.all_reduce_chunks, shape.expert_all_reduce_chunks)))
    return _small_graph(shape) if pieces <= SMALL else _large_graph(shape)


@lru_cache(maxsize=1024)
def _small_graph(shape: StepShape) -> Graph:
    return _built(shape)


@lru_cache(maxsize=8)
def _large_graph(shape: StepShape) -> Graph:
    return _built(shape)


def _built(shape: StepShape) -> Graph:
    plain = PlainStep(
        moe_layers=shape.moe_layers,
        exchange_counts=shape.exchange_counts,
        shared_experts=shape.shared_experts,
    )
    passes = in_order((*passes_of(shape), *shape.more))
    early = tuple(each for each in passes if each.stage < Stage.GRADIENTS)
    graph = apply(_rewritten(plain, early), passes[len(early) :]).check()
    if shape.more:
        check_complete(graph, shape)
    return graph


@lru_cache(maxsize=128)
def _rewritten(plain: PlainStep, passes: tuple[Pass, ...]) -> Graph:
    """Return the plain step rewritten by passes before the reductions. Cached: a search tries each step with
    many sizes of gradient pieces, and many numbers of chunks in a step that is alike up to there."""
    return apply(_rewritten(plain, passes[:-1]), passes[-1:]) if passes else plain.graph()
