"""The memory that a plan takes on each rank: a formula, not a measurement.

A rank has weights W, gradients W, moments 2 W (AdamW), activations of the batch, and buffers.

W = 4 bytes x (this rank's weights outside of experts + layers x experts on this rank x matrices x M x H /
etp). Where the workload says what a rank holds, weights are all of these, frozen ones included, in their own
type; gradients and moments are those of trained weights.

Replica slots count as experts on this rank that have no moments. With a sharded optimiser a rank has the
moments of its share: of every kind of weights, one part among the ranks that sum its gradients. Where
gradients are released once they are summed, a rank keeps such a share of them, too, and the whole gradients
of two layers.

Activations are kept from forward to backward, and the sums that normalise the loss end the whole forward
before any backward begins: cutting the batch saves none of them. Per token and layer: e (8 M + r (4 M + c
H)), with e bytes per element, r rows per token, c = 2 for GELU and 4 for SwiGLU; a dense block e (8 M + 2
H_dense); logits twice in float32. Where experts have no fixed slots and the problem says how rows are spread
(load, or a known routing), the rank that needs most is estimated, with the rows that it receives in every
layer once the choice has moved samples and experts. Ranks that share attention divide heads, dense widths,
the vocabulary and, where tokens are split, what stays between blocks; the shards of an expert all have its
rows. What the framework and the transports need themselves is not counted. Where experts are recomputed, only
the rows that they received are kept, e r M; where blocks are, e (M + 2 r M): a block's input, its rows,
received and returned, and the input of shared experts. Then buffers hold one whole block.

Where products are computed in e < 4 bytes, every weight of 4 bytes has a copy of e bytes between forward and
backward, but for an embedding that is not the head as well, which no product reads. Contexts and
communicators of GPUs are not counted here: what may be taken is measured beside them. On a stand-in for a
GPU, which counts the bytes of its tensors, the sum is from 5 % too little to 18 % too much. Parameters that
are gathered for each use have copies of what is gathered: two layers.

Against measurements (default model, memory of a step above what is held before it, MiB): activations and
buffers are 292 for sequential (measured 264 to 296) and moe_pipeline (247 to 256), 259 for flowmoe and
penstock with R = 2 (242 to 287), 242 with R = 4 (244 to 257): from 10 % too little to 18 % too much.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from penstock.cost import Workload
from penstock.decision import Decision
from penstock.features.sharded_optimizer.feature import LAYERS
from penstock.ops.core import GRADIENT_KINDS, KindName
from penstock.ops.work import FLOAT32_BYTES
from penstock.plan.problem import Problem
from penstock.routing.sizes import Floats
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS

MOMENTS = 2
"""Tensors that AdamW keeps for every weight that it trains, each as large as the weight."""

GATHERED_COPIES, BLOCK_COPIES = 3, 3
"""Hidden states that a block saves per token: for all tokens, the input of attention's norm, as it is scaled,
and its output; for this rank's heads what `Attention.kept` says; for the tokens that stay on this rank
between blocks, the residual, as it is scaled, and the output of that norm. (A norm that is one kernel keeps
nothing scaled.)"""

HOME_COPIES, EXPERT_ROW_COPIES = 2, 2
"""Hidden states per routed row: at home, the permuted and the returned row; at the experts, the received row
and their output."""

WIDE_COPIES = {2: 2, 3: 4}
"""Hidden activations of an expert per row, by its number of matrices: GELU's input and output; SwiGLU's gate,
its activation, the other factor, and the product."""

ENTERED_COPIES = 2
"""Hidden states that ranks which share attention keep per token of a recomputed block, beside all tokens
gathered: the block's input, and what attention added."""

LOGIT_COPIES = 2

STATE, ACTIVATIONS, BUFFERS, COPIES = (
    "weights, gradients and optimizer state",
    "activations",
    "buffers",
    "weights in the type of products",
)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank, the one that needs most where loads are known, in the middle of a step.

    Attributes:
        buffers_bytes: Gradients of the piece of one layer that is being computed, and rows sent and received.
        copies_bytes: The copies of weights in the type in which products are computed, where that is a
            smaller one.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    copies_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by description, the largest first. Weights, gradients and optimizer state grow together."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        parts = {
            STATE: state,
            ACTIVATIONS: self.activations_bytes,
            BUFFERS: self.buffers_bytes,
        }
        if self.copies_bytes:
            parts[COPIES] = self.copies_bytes
        return dict(sorted(parts.items(), key=lambda part: -part[1]))


def memory_kind(problem: Problem, choice: Decision) -> object:
    """Return what choices have in common that need the same memory, quicker to find than the memory."""
    if problem.evidence is not None or problem.observed is not None:
        return choice
    cut = problem.cut(choice)
    return cut.microbatches, cut.expert_form, cut.recompute, choice.form, choice.num_replica_slots


def estimate_memory(problem: Problem, choice: Decision) -> MemoryEstimate:
    """Estimate what a rank needs for a plan, by the formula of this module."""
    replicas = int(choice.num_replica_slots * sum(problem.shape.moe_layers) * problem.workload.expert_bytes)
    cut, work = problem.cut(choice), problem.workload
    layers = problem.shape.moe_layers
    whole, moe_loads = replace(cut, recompute="none"), problem.expert_loads(choice, cut)
    # By layer the rows that every rank's experts receive over the mean; of a dense layer, ones.
    ones_P, remaining = np.ones(moe_loads.shape[1]), iter(moe_loads)
    loads = [next(remaining) if is_moe else ones_P for is_moe in layers]
    kinds = [(is_moe, load_P.tobytes()) for is_moe, load_P in zip(layers, loads, strict=True)]
    examples = dict(zip(kinds, loads, strict=True))  # layers of a kind are worked out once
    kept, per_layer = (
        {kind: _layer_bytes(work, shape, kind[0], load_P) for kind, load_P in examples.items()}
        for shape in (cut, whole)
    )
    microbatches = cut.microbatches
    logits = work.tokens(0, 1) * work.vocab_size * FLOAT32_BYTES * LOGIT_COPIES / work.tp_size
    piece_rows = work.rows(0, microbatches, 0, 1, *_row_shares(work, cut)) * work.etp_size
    wire_bytes = work.wire_bytes(piece_rows) if any(layers) else 0.0
    buffers_P = (
        np.maximum.reduce([*per_layer.values()]) / microbatches
        + (1 + np.maximum.reduce([*examples.values()])) * wire_bytes
    )
    kept_P = np.add.reduce([kept[kind] for kind in kinds])
    most = int(np.argmax(kept_P + buffers_P))
    # Bytes over those of float32 weights; where other weights are kept, moments come with float32 weights.
    state = work.state
    sizes = state.parameter_bytes, state.gradient_bytes, MOMENTS * state.moment_bytes
    weights, gradients, moments = (size / FLOAT32_BYTES for size in sizes)
    moments += weights < 1
    trained, updating = trained_bytes(problem), problem.shape.updating
    kept_weights, kept_gradients = _weights_bytes(problem), sum(trained.values())
    # Sums of earlier passes are put aside while a pass makes its own. Gradients that no other rank adds to
    # are added to in place, and released ones to the share that is kept.
    aside, releases = 0, updating is not None and updating.releases
    if problem.passes > 1 and updating is None:
        owners = _owners(problem)
        aside = sum(size for kind, size in trained.items() if owners[kind] > 1)
    elif problem.passes > 1 and not releases:
        aside = _updated_bytes(problem)
    if state.fully_sharded or releases:  # of what is gathered, or released, there are a share and two layers
        shared = _updated_bytes(problem) + _gathered_bytes(problem, choice)
        kept_weights = shared if state.fully_sharded else kept_weights
        kept_gradients = shared if releases else kept_gradients
    return MemoryEstimate(
        weights_bytes=int(weights * (kept_weights + replicas)),
        gradients_bytes=int(gradients * (kept_gradients + aside + replicas)),
        optimizer_bytes=int(moments * _updated_bytes(problem)),
        activations_bytes=int(kept_P[most] + logits),
        buffers_bytes=int(buffers_P[most]),
        copies_bytes=_copies_bytes(problem, choice, replicas),
    )


def trained_bytes(problem: Problem) -> dict[KindName, int]:
    """Return the bytes of this rank's trained weights, by kind of gradients."""
    work = problem.workload
    sizes = work.gradients_of("gather")
    experts = sum(problem.shape.moe_layers) * work.placement.slots * work.expert_bytes
    trained = int(experts) if work.held is None else work.held.trained_experts
    return {kind: sum(layers) for kind, layers in sizes.items()} | {"experts": trained}


def _weights_bytes(problem: Problem) -> int:
    """Return the bytes of all weights, frozen ones included."""
    held = problem.workload.held
    return sum(trained_bytes(problem).values()) if held is None else held.weights


def _gathered_bytes(problem: Problem, choice: Decision) -> int:
    """Return the bytes of what ranks own shares of, in the largest layers that are whole at a time."""
    shared = [kind for kind, owners in _owners(problem).items() if owners > 1]
    sizes_of = problem.workload.gradients_of(choice.form)
    sums = [sum(sizes_of[kind][layer] for kind in shared) for layer in range(problem.shape.num_layers)]
    return max(sum(sums[i : i + LAYERS]) for i in range(len(sums)))


def _copies_bytes(problem: Problem, choice: Decision, replicas: int) -> int:
    """Return the bytes of weights in the type of products, none where all weights have that type."""
    work = problem.workload
    cast = work.held is None or work.held.cast
    if not cast or work.element_bytes >= work.state.parameter_bytes:
        return 0
    embedding = 0
    if not work.tied_embeddings:
        embedding = work.vocab_size * work.hidden_size * FLOAT32_BYTES // work.tp_size
    copied = _weights_bytes(problem) - embedding
    if work.state.fully_sharded:
        owners = _owners(problem)
        own = sum(size for kind, size in trained_bytes(problem).items() if owners[kind] == 1)
        copied = min(copied, own + _gathered_bytes(problem, choice))
    return (copied + replicas) * work.element_bytes // FLOAT32_BYTES


def _updated_bytes(problem: Problem) -> int:
    """Return the bytes of weights that this rank updates: all, or a share where the step updates."""
    trained = trained_bytes(problem)
    if problem.shape.updating is None:
        return sum(trained.values())
    owners = _owners(problem)
    return sum(-(-size // owners[kind]) for kind, size in trained.items())


def _owners(problem: Problem) -> dict[KindName, int]:
    """Return, for each kind of gradients, the number of ranks that sum them, each of which owns a share."""
    sharing, mesh = problem.workload.tp_size > 1, problem.workload.mesh
    return {name: mesh.size(kind.axes_of(sharing=sharing)) for name, kind in GRADIENT_KINDS.items()}


def _layer_bytes(work: Workload, cut: StepShape, is_moe: bool, load_P: Floats) -> Floats:
    """Return what one layer keeps for its backward; load_P: each rank's rows over their mean."""
    tokens, hidden, tp_size = work.tokens(0, 1), work.hidden_size, work.tp_size
    kept = work.tokens(0, 1, tp_size if cut.sharing.tokens == "split" else 1)
    heads = work.heads.kept / tp_size
    block = tokens * (GATHERED_COPIES * hidden + heads) + kept * BLOCK_COPIES * hidden
    if cut.recompute == "blocks":
        block = hidden * (kept if tp_size == 1 else tokens + kept * ENTERED_COPIES)
    if not is_moe:
        dense = 0.0 if cut.recompute == "blocks" else tokens * 4 * work.dense_ffn_hidden_size / tp_size
        return work.element_bytes * (block + dense) * np.ones_like(load_P)
    wide = WIDE_COPIES[work.expert_matrices]
    gate_shares = tp_size if FORM_TOKENS[cut.expert_form] == "split" else 1
    home = work.rows(0, 1, 0, 1, gate_shares) * HOME_COPIES * hidden
    there = load_P * work.rows(0, 1, 0, 1, *_row_shares(work, cut))
    expert = there * (work.etp_size * EXPERT_ROW_COPIES * hidden + wide * work.ffn_hidden_size)
    wide_shared = wide * work.shared_ffn_hidden_size
    if cut.recompute != "none":
        expert = there * work.etp_size * hidden
    if cut.recompute == "blocks":
        home, wide_shared = home / HOME_COPIES, hidden if wide_shared else 0
    shared = work.tokens(0, 1, gate_shares) * wide_shared
    return work.element_bytes * (block + home + expert + shared)


def _row_shares(work: Workload, cut: StepShape) -> tuple[int, int]:
    """Return how many ranks cut the same samples, and how many deal out rows, when experts get them."""
    if cut.expert_form == "baseline":
        return 1, 1
    return (work.tp_size, 1) if FORM_TOKENS[cut.expert_form] == "split" else (1, work.tp_size)
