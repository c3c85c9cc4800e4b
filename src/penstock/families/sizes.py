"""Sizes of a model of transformers, as plans and cost models need them, read off its modules.

So they hold for latent vectors, layers without heads, and whatever else a family has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from penstock.cost.workload import Attention, HeldBytes, Reach, Workload
from penstock.decision import GradientBytes
from penstock.families.described import setting_of
from penstock.moe import MoEConfig
from penstock.topology import Layout

FORMS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers with heads that look back a limited number of tokens, and the setting that says it."""

STATES = ("linear_attention", "mamba", "mamba2")
"""Kinds of layers that keep a state instead of keys."""

STATELESS = ("conv", "moe", "mlp")
"""Kinds of layers that neither compare tokens nor keep a state."""

STATE_SIZES = ("linear_key_head_dim", "mamba_d_state", "ssm_state_size")
USUAL_STATE = 128


def matrices_of(module: nn.Module, without: Iterable[nn.Module | None] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a module's matrices, whole ones where this rank has a part.

    Args:
        without: Modules inside whose matrices are left out.
    """
    seen = {id(parameter) for other in without if other is not None for parameter in other.parameters()}
    for part in module.modules():
        cuts = getattr(part, "shardings", {})
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dim() > 1 and id(parameter) not in seen:
                seen.add(id(parameter))
                yield tuple(cuts[name].shape if name in cuts else parameter.shape)


def attention_of(config: Any, layers: Sequence[Any], others: Sequence[Sequence[Any]]) -> Attention:
    """Return the attention of a model.

    Args:
        config: Configuration of its text part.
        layers: The layers of its decoder.
        others: For every layer the modules that do not belong to attention: experts, router, shared experts,
            or a dense part.
    """
    shapes: Counter[tuple[int, int]] = Counter()
    for layer, apart in zip(layers, others, strict=True):
        shapes.update((prod(shape[1:]), shape[0]) for shape in matrices_of(layer, apart))
    heads = setting_of(config, "num_attention_heads", 1)
    groups = setting_of(config, "num_key_value_heads") or heads
    usual = setting_of(config, "head_dim") or max(1, config.hidden_size // heads)
    width = setting_of(config, "qk_head_dim") or usual
    values = setting_of(config, "v_head_dim") or usual
    kept = moved = 4.0 * (heads + groups) * width
    if latent := setting_of(config, "kv_lora_rank"):  # keys and values are made of it for every head
        twice = latent + (setting_of(config, "q_lora_rank") or 0)
        kept = heads * (4 * width + 2 * values) + 2 * twice
        moved = 2 * kept  # what is turned, and what is not, are split, repeated and joined
    return Attention(
        matrices=tuple((*shape, number / len(layers)) for shape, number in sorted(shapes.items())),
        queries=heads * width,
        values=heads * values,
        kept=kept,
        moved=moved,
        width=values,
        reaches=_reaches(config, len(layers)),
    )


def _reaches(config: Any, layers: int) -> tuple[Reach, ...]:
    """Return how far layers look back, by their kinds or, where none are said, by a window of all."""
    kinds = setting_of(config, "layer_types")
    if not kinds or len(kinds) != layers:
        window = setting_of(config, "sliding_window") if setting_of(config, "use_sliding_window", True) else 0
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    counts = Counter(kind for kind in kinds if kind not in STATELESS)
    reaches = []
    for kind in sorted(counts):
        share, size = counts[kind] / layers, setting_of(config, FORMS[kind]) if kind in FORMS else None
        if kind in STATES:
            sizes = (setting_of(config, name) for name in STATE_SIZES)
            reaches.append(Reach(share, "state", next(filter(None, sizes), USUAL_STATE)))
        elif not isinstance(size, int) or size < 1:
            reaches.append(Reach(share))
        else:
            reaches.append(Reach(share, "chunk" if kind == "chunked_attention" else "window", size))
    return tuple(reaches)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model for a plan.

    Attributes:
        heads: Heads of queries.
        key_value_heads: Heads of keys and values; None = as many as heads of queries.
        head_dim: Width of a head; None = `hidden_size / heads`.
        dense_width: Hidden width of dense layers; 0 = there are none.
        shared_width: Hidden width of shared experts; 0 = there are none.
        expert_matrices: Number of matrices of an expert.
        element_bytes: Bytes of a number of activations.
        attention: The attention of its layers; None = there is nothing but such heads.
    """

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
        """Return the sizes of a step with these samples on every rank.

        Args:
            gradients: Bytes of reduced gradients.
            batch: Samples per rank.
            length: Tokens per sample.
            held: Bytes of weights that a rank holds.
        """
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
            held_expert_bytes=gradients.expert,
        )
