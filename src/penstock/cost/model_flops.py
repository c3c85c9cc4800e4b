"""Operations that a model needs for one token, independently of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cost.cluster_file import ClusterFile
from penstock.cost.devices import Computing, find_device
from penstock.cost.workload import Workload
from penstock.words import flop_rate

PASSES = 3
"""Forward and backward, in forward passes: backward makes gradients of inputs and of weights."""


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Operations of a model, and the peak of its devices.

    Attributes:
        per_token: The floating-point operations of the matrix products of a forward and a backward pass, of
            the whole model.
        peak_per_s: The operations per second of all ranks together; None = not known.
        peak_words: The peak of one rank, and whether the data sheet says so or a profile measured it.
    """

    per_token: float
    peak_per_s: float | None
    peak_words: str | None = None

    @staticmethod
    def of(
        work: Workload,
        moe_layers: Sequence[bool],
        file: ClusterFile | None,
        device: str = "",
        precision: Computing = "float32",
    ) -> ModelFlops:
        """Count the operations of a model.

        Every token counts as many experts as it may choose, also those that have no room for it. Attention
        counts what a causal mask leaves.

        Args:
            work: The sizes of the step.
            moe_layers: For every layer, whether it is an MoE layer.
            file: The cluster, if it was measured.
            device, precision: The device of a rank and the type of its products. Where the device is known,
                the peak is that of its data sheet, as others count it, and otherwise the fastest product that
                was measured.
        """
        sheet, source = find_device(device), f"data sheet of {device}"
        tflops = None if sheet is None else sheet.peak_tflops(precision)
        peak_per_s = None if tflops is None else 1e12 * tflops
        if peak_per_s is None and file is not None:
            peak_per_s, source = file.peak_flops_per_s, "fastest product measured"
        # By the sizes of `work`, of one token in a forward pass.
        rows = work.slots_per_sample * work.num_experts / work.seq_len or work.top_k
        sparse = work.attention_flops(1) + work.expert_flops(rows) + work.shared_flops(1)
        dense = work.attention_flops(1) - work.router_flops(1) + work.dense_flops(1)
        per_token = PASSES * (sum(sparse if is_moe else dense for is_moe in moe_layers) + work.head_flops(1))
        if peak_per_s is None:
            return ModelFlops(per_token=per_token, peak_per_s=None)
        text = f"{flop_rate(peak_per_s)} per rank ({source})"
        return ModelFlops(per_token=per_token, peak_per_s=work.world_size * peak_per_s, peak_words=text)

    def utilisation(self, tokens_per_s: float) -> float | None:
        """Return the share of the peak that the model's own products use; None where no peak is known."""
        return None if self.peak_per_s is None else self.per_token * tokens_per_s / self.peak_per_s
