"""Lines of text about a step that is drawn: sharing, the cluster, the pieces, moves. One line each."""

from __future__ import annotations

from penstock.cost import ClusterConfig
from penstock.report.timeline import duration_text
from penstock.step import StepShape
from penstock.step.shape import Updating
from penstock.words import counted


def sharing_text(shape: StepShape) -> str:
    """Say which ranks share what."""
    sharing = shape.sharing
    return (
        f"{counted(sharing.tp_size, 'rank')} share attention (tp), {sharing.etp_size} every expert (etp); "
        f"between blocks tokens are {sharing.tokens}; rows reach all shards as in {shape.expert_form}"
    )


def cluster_text(cluster: ClusterConfig, *, nodes: bool) -> str:
    """Give the rates of a cluster."""
    inside = f" between nodes, {cluster.intra_bytes_per_s / 1e6:g} MB/s inside" if nodes else ""
    return (
        f"link {cluster.link_bytes_per_s / 1e6:g} MB/s{inside}, latency "
        f"{duration_text(cluster.link_latency_s)}; per rank {cluster.flops_per_s / 1e9:g} GFLOP/s, "
        f"memory {cluster.memory_bytes_per_s / 1e9:g} GB/s"
    )


def placement_text(shape: StepShape) -> str:
    """Say what moves; empty if nothing does."""
    samples = ["samples get new homes in every MoE layer"] if shape.moves_samples else []
    slots = f"every rank hosts up to {counted(shape.replica_slots, 'expert')} of others per MoE layer"
    return "; ".join([*samples, *([slots] if shape.replica_slots else [])])


def again_text(shape: StepShape) -> str:
    """Say what is recomputed."""
    what = "experts run" if shape.recompute == "experts" else "attention, router and experts run"
    return f"{what} a second time before their backward (in lower case), on the rows that have come already"


def updating_text(updating: Updating) -> str:
    """Say what a sharded optimiser adds to a step."""
    text = (
        "every rank owns a share of what is replicated: gradients are summed in shares (RA) and clipped by "
        "their norm (NM), shares are updated (OA; all of a rank's experts: OX), and gathered (PA): the first "
        "layer's at once, all others by the next step"
    )
    room = "; whole gradients of two layers at a time are kept, the others wait for their sums"
    return text + room if updating.releases else text


def pieces_text(shape: StepShape) -> str:
    """Count what a step is cut into."""
    microbatches = counted(shape.microbatches, "microbatch", "es")
    chunks, backward = counted(shape.chunks, "chunk"), shape.backward_chunks
    if backward != shape.chunks:
        chunks = f"{shape.chunks} forward and {counted(backward, 'backward chunk')}"
    if shape.pair_slices > 1:
        chunks = f"{shape.pair_slices} slices of combine and gather (which overlap)"
    reduced = counted(max(shape.all_reduce_chunks), "all-reduce chunk")
    return f"{microbatches}, {chunks} per MoE layer, {reduced} per layer"
