"""Section `[model]`: the decoder around the MoE layers."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import ConfigError


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
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    seq_len: int = 128
    vocab_size: int = 256
    moe_layers: tuple[int, ...] | None = None
    ffn_hidden_size: int | None = None
    dropout: float = 0.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for key in ("num_layers", "hidden_size", "num_heads", "seq_len", "vocab_size"):
            if getattr(self, key) < 1:
                raise ConfigError(key, getattr(self, key), "must be positive", "Use 1 or more.")
        if self.hidden_size % self.num_heads:
            valid = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0]
            nearest = min(valid, key=lambda n: abs(n - self.num_heads))
            why = f"must divide hidden_size ({self.hidden_size})"
            raise ConfigError("num_heads", self.num_heads, why, f"Nearest valid: {nearest}.")
        if not 0 <= self.dropout < 1:
            raise ConfigError("dropout", self.dropout, "is a probability below 1", "Use 0 for none.")
        if self.ffn_hidden_size is not None and self.ffn_hidden_size < 1:
            raise ConfigError("ffn_hidden_size", self.ffn_hidden_size, "must be positive", "Use none for 4x.")
        if self.moe_layers == ():
            raise ConfigError("moe_layers", [], "a model needs an MoE layer", "Use none for all layers.")
        for layer in self.moe_layers or ():
            if not 0 <= layer < self.num_layers:
                why = f"layers are counted from 0 to {self.num_layers - 1}"
                nearest = min(max(layer, 0), self.num_layers - 1)
                raise ConfigError("moe_layers", list(self.moe_layers or ()), why, f"Nearest: {nearest}.")

    def is_moe(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is an MoE layer."""
        return self.moe_layers is None or layer in self.moe_layers

    @property
    def dense_hidden_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size
