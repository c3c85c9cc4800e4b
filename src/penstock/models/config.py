"""Section `[model]`: the decoder around the MoE layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from penstock.config import ConfigError, Items, Within, check_bounds

MOST_LAYERS = 1024
Layers = Annotated[int, Within(1, MOST_LAYERS, "every layer adds dozens of tasks to a step's plan")]
Layer = Annotated[int, Within(0, MOST_LAYERS - 1, "layers are counted from 0")]
Width = Annotated[int, Within(1, 1 << 20, "the widest published models have some 20,000")]
"""Width of a vector per token."""

Tokens = Annotated[int, Within(1, 1 << 24, "a sample's attention is computed in one piece")]
Symbols = Annotated[int, Within(1, 1 << 24, "the largest vocabularies have a million symbols")]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT-style decoder.

    preset: name of a published model that replaces the sizes of [model] and [moe]; none = as given here.
    num_layers: blocks. hidden_size: width of the residual stream. num_heads: must divide hidden_size.
    seq_len: tokens per sample. vocab_size: 256 for bytes.
    moe_layers: which layers have an MoE part, counted from 0; none = all of them.
    ffn_hidden_size: hidden width of the dense layers; none = 4 * hidden_size.
    dropout: of embedding, attention output and feed-forward output; the same for every schedule and layout.
    tie_word_embeddings: token embedding and output head are one matrix.
    """

    preset: str | None = None
    num_layers: Layers = 4
    hidden_size: Width = 128
    num_heads: Width = 4
    seq_len: Tokens = 128
    vocab_size: Symbols = 256
    moe_layers: Annotated[tuple[Layer, ...], Items(MOST_LAYERS, "each layer once", least=1)] | None = None
    ffn_hidden_size: Width | None = None
    dropout: Annotated[float, Within(0, 1, "it is a probability", below=True)] = 0.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.hidden_size % self.num_heads:
            valid = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0]
            nearest = min(valid, key=lambda n: abs(n - self.num_heads))
            why = f"must divide hidden_size ({self.hidden_size})"
            raise ConfigError("num_heads", self.num_heads, why, f"Nearest valid: {nearest}.")
        for layer in self.moe_layers or ():
            if layer >= self.num_layers:
                why = f"layers are counted from 0 to {self.num_layers - 1}"
                raise ConfigError("moe_layers", self.moe_layers, why, f"Nearest: {self.num_layers - 1}.")

    def is_moe(self, layer: int) -> bool:
        """Return whether a layer's feed-forward part is an MoE layer."""
        return self.moe_layers is None or layer in self.moe_layers

    @property
    def dense_hidden_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size
