"""How much memory a plan takes on each rank: a formula, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.decision import Decision
from penstock.plan.problem import Problem

FLOAT32_BYTES = 4
MOMENTS = 2
"""What AdamW keeps for every weight, in float32."""

BLOCK_COPIES = 8
"""Hidden states that a block saves per token: two norms' inputs, queries, keys, values, attention's output
twice, and the residual."""

ROW_COPIES = 4
"""Hidden states per routed row: ordered, received, the experts' output, and what came home."""

EXPERT_COPIES = {2: 2, 3: 4}
"""Hidden activations of an expert per row, by its matrices: GELU's input and output; SwiGLU's gate, its
activation, the other factor, and the product."""

LOGIT_COPIES = 2

STATE, ACTIVATIONS, BUFFERS = "weights, gradients and optimizer state", "activations", "buffers"


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """What a rank has for training. Bytes."""

    bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank in the middle of a step.

    buffers_bytes: gradients of the piece of one layer that is under way, and rows sent and received.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def parts(self) -> dict[str, int]:
        """In words, the largest first. Weights, gradients and optimizer state grow together."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        parts = {
            STATE: state,
            ACTIVATIONS: self.activations_bytes,
            BUFFERS: self.buffers_bytes,
        }
        return dict(sorted(parts.items(), key=lambda part: -part[1]))


def estimate_memory(problem: Problem, choice: Decision) -> MemoryEstimate:
    """Weights W, gradients W, AdamW's moments 2 W, activations of the whole batch, buffers.

    W = 4 bytes x (replicated weights + layers x experts per rank x matrices x M x H / shards). Activations
    are kept from forward to backward, and the sums that normalise the loss end the whole forward before any
    backward begins: cutting the batch saves none of them. Per token and layer: e (8 M + r (4 M + c H)), with
    e bytes per element, r rows per token, c = 2 for GELU and 4 for SwiGLU; a dense block e (8 M + 2 H_dense);
    logits twice in float32. What the framework and the transports need themselves is not counted.

    Against BENCHMARKS.md (default model, memory of a step above what is held before it, MiB): activations and
    buffers are 292 for sequential (measured 264 to 296) and moe_pipeline (247 to 256), 259 for flowmoe and
    penstock with R = 2 (242 to 287), 242 with R = 4 (244 to 257): from 10 % too little to 18 % too much.
    """
    weights = _weights_bytes(problem)
    per_layer = [_layer_bytes(problem, is_moe) for is_moe in problem.shape.moe_layers]
    work = problem.workload
    tokens = work.tokens(0, 1)
    microbatches = problem.cut(choice).microbatches
    logits = tokens * work.vocab_size * FLOAT32_BYTES * LOGIT_COPIES
    piece_rows = work.rows(0, microbatches, 0, 1) if any(problem.shape.moe_layers) else 0.0
    return MemoryEstimate(
        weights_bytes=weights,
        gradients_bytes=weights,
        optimizer_bytes=MOMENTS * weights,
        activations_bytes=int(sum(per_layer) + logits),
        buffers_bytes=int(max(per_layer) / microbatches + 2 * work.wire_bytes(piece_rows)),
    )


def _weights_bytes(problem: Problem) -> int:
    work = problem.workload
    expert = work.expert_matrices * work.hidden_size * work.ffn_hidden_size * FLOAT32_BYTES
    experts = sum(problem.shape.moe_layers) * work.placement.slots * expert / work.shard_size
    return sum(work.all_reduce_bytes) + int(experts)


def _layer_bytes(problem: Problem, is_moe: bool) -> float:
    """What the whole batch of one rank leaves behind in one layer until its backward."""
    work = problem.workload
    tokens, hidden = work.tokens(0, 1), work.hidden_size
    block = tokens * BLOCK_COPIES * hidden
    if not is_moe:
        return work.element_bytes * (block + tokens * 2 * work.dense_ffn_hidden_size)
    copies = EXPERT_COPIES[work.expert_matrices]
    expert = work.rows(0, 1, 0, 1) * (ROW_COPIES * hidden + copies * work.ffn_hidden_size)
    shared = tokens * copies * work.shared_ffn_hidden_size
    return work.element_bytes * (block + expert + shared)
