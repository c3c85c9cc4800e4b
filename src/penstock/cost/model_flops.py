"""Operations that a model needs for one token, independently of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cost.cluster_file import ClusterFile
from penstock.cost.workload import Workload

PASSES = 3
"""Forward and backward, in forward passes: backward makes gradients of inputs and of weights."""


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Operations of a model, and the peak of its devices.

    per_token: floating-point operations of the matrix products of a forward and a backward pass, of the whole
    model. peak_per_s: operations per second of all ranks together; None = not measured.
    """

    per_token: float
    peak_per_s: float | None

    @staticmethod
    def of(work: Workload, moe_layers: Sequence[bool], file: ClusterFile | None) -> ModelFlops:
        """Count the operations of a model.

        moe_layers: for every layer, whether it is an MoE layer. file: of the cluster, if it was measured.
        Every token counts as many experts as it may choose, also those that have no room for it. Attention
        counts what a causal mask leaves.
        """
        measured_s = None if file is None else file.peak_flops_per_s
        return ModelFlops(
            per_token=PASSES * _forward(work, moe_layers),
            peak_per_s=None if measured_s is None else work.world_size * measured_s,
        )

    def utilisation(self, tokens_per_s: float) -> float | None:
        """Return the share of the peak that the model's own products use; None where no peak is known."""
        return None if self.peak_per_s is None else self.per_token * tokens_per_s / self.peak_per_s


def _forward(work: Workload, moe_layers: Sequence[bool]) -> float:
    """Return the operations of one token in a forward pass, by the sizes of `work`."""
    rows = work.slots_per_sample * work.num_experts / work.seq_len or work.top_k
    sparse = work.attention_flops(1) + work.expert_flops(rows) + work.shared_flops(1)
    dense = work.attention_flops(1) - work.router_flops(1) + work.dense_flops(1)
    return sum(sparse if is_moe else dense for is_moe in moe_layers) + work.head_flops(1)
