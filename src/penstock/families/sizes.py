"""Sizes of a model of transformers, as plans and cost models need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.cost import Attention, HeldBytes, Workload
from penstock.decision import GradientBytes
from penstock.moe import MoEConfig
from penstock.topology import Layout


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model for a plan. key_value_heads, head_dim: None = as many as heads, of the width that is
    left. attention: of its layers; None: there is nothing but such heads. element_bytes: of its
    activations."""

    hidden_size: int
    vocab_size: int
    heads: int
    key_value_heads: int | None
    head_dim: int | None
    dense_width: int
    shared_width: int
    expert_matrices: int
    element_bytes: int
    moe: MoEConfig
    attention: Attention | None = None

    @property
    def groups(self) -> int:
        """Heads of keys and values, as far as several of queries share one evenly."""
        groups = self.key_value_heads or self.heads
        return groups if self.heads % groups == 0 else self.heads

    @property
    def width(self) -> int:
        """Width of a head, rounded up to an even number."""
        width = self.head_dim or max(1, self.hidden_size // self.heads)
        return width + width % 2

    def model_settings(self, moe_layers: Sequence[bool]) -> dict[str, Any]:
        """Return settings of section `[model]` for a decoder of Penstock's own with these sizes.

        Args:
            moe_layers: Which layers have experts.
        """
        return {
            "num_layers": len(moe_layers),
            "hidden_size": self.hidden_size,
            "num_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.width,
            "vocab_size": self.vocab_size,
            "moe_layers": tuple(layer for layer, moe in enumerate(moe_layers) if moe),
            "ffn_hidden_size": self.dense_width or None,
        }

    def workload(
        self,
        layout: Layout,
        gradients: GradientBytes,
        batch: int,
        length: int,
        held: HeldBytes | None = None,
    ) -> Workload:
        """Return the sizes of a step with these samples on every rank. held: a rank's bytes of weights."""
        return Workload(
            batch=max(1, batch),
            seq_len=max(1, length),
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.moe.moe_ffn_hidden_size,
            vocab_size=self.vocab_size,
            num_experts=self.moe.num_experts,
            top_k=self.moe.top_k,
            expert_matrices=self.expert_matrices,
            capacity_factor=self.moe.slots_factor,
            min_capacity=self.moe.min_capacity,
            world_size=layout.world_size,
            ep_size=layout.ep_size,
            element_bytes=self.element_bytes,
            all_reduce_bytes=gradients.replicated,
            expert_all_reduce_bytes=gradients.experts,
            partial_all_reduce_bytes=gradients.partial,
            partial_by_form=gradients.partial_by_form,
            tp_size=layout.tp_size,
            etp_size=layout.etp_size,
            attention_size=self.heads * self.width,
            key_value_size=self.groups * self.width,
            attention=self.attention,
            dense_ffn_hidden_size=self.dense_width,
            wire_row_bytes=self.moe.row_bytes(self.hidden_size, self.element_bytes),
            dispatch=self.moe.dispatch,
            node_size=layout.ep_node_size,
            devices_per_node=layout.node_size,
            shared_ffn_hidden_size=self.shared_width,
            held=held,
        )
