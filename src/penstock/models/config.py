"""Section `[model]`: the decoder around the MoE layers, also by the names of published benchmark models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from penstock.config import ConfigError, Items, Within, check_bounds
from penstock.config.bounds import FilePath, Name
from penstock.moe import MoEConfig
from penstock.plan.models import MODELS, PublishedModel

QWEN3_MOE = "qwen3_moe"
"""Architecture of Penstock's own decoder, as transformers names it."""

MOST_LAYERS = 1024
Layers = Annotated[int, Within(1, MOST_LAYERS, "every layer adds dozens of tasks to a step's plan")]
Layer = Annotated[int, Within(0, MOST_LAYERS - 1, "layers are counted from 0")]
Width = Annotated[int, Within(1, 1 << 20, "the widest published models have some 20,000")]
"""Width of a vector per token."""

Tokens = Annotated[int, Within(1, 1 << 24, "a sample's attention is computed in one piece")]
Symbols = Annotated[int, Within(1, 1 << 24, "the largest vocabularies have a million symbols")]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: Penstock's own, with the architecture of Qwen3-MoE, or a model of transformers."""

    preset: str | None = None
    """A published model by name, one of `flowmoe/` in `penstock list models`; its sizes replace the defaults
    of `[model]`, `[moe]` and the batch; keys that you set with it take precedence; none = as given here."""
    config: FilePath | None = None
    """The `config.json` of a model of transformers, or its folder; its sizes replace those of `[model]` and
    `[moe]` as a preset's do; training begins with the weights in a folder
    ([more](training.md#a-model-of-transformers))."""
    model_type: Name = QWEN3_MOE
    """Architecture, as transformers names it; others than qwen3_moe come from `config` alone."""
    config_sha256: Name | None = None
    """Sha256 of all that decides in `config` what a model of transformers computes; `config` says it."""
    num_layers: Layers = 4
    """Blocks of the decoder."""
    hidden_size: Width = 128
    """Width of the residual stream."""
    num_heads: Width = 4
    """Heads of queries."""
    num_key_value_heads: Width | None = None
    """Heads of keys and values, each of which serves as many heads of queries; must divide `num_heads`; none
    = `num_heads`."""
    head_dim: Width | None = None
    """Width of a head, an even number; none = `hidden_size / num_heads`."""
    seq_len: Tokens = 128
    """Tokens per sample."""
    vocab_size: Symbols = 256
    """Symbols; 256 is bytes; it must hold every token of the text."""
    moe_layers: Annotated[tuple[Layer, ...], Items(MOST_LAYERS, "each layer once", least=1)] | None = None
    """Numbers of the layers that have experts, from 0; none = all."""
    ffn_hidden_size: Width | None = None
    """Hidden width of dense layers; none = 4 x `hidden_size`."""
    rope_theta: Annotated[float, Within(1, 1e12, "angles of neighbouring tokens differ by its powers")] = 1e4
    """Base of the rotary positions."""
    rms_norm_eps: Annotated[float, Within(0, 1, "it is added to a mean square", above=True)] = 1e-6
    """What norms add to the mean square."""
    dropout: Annotated[float, Within(0, 1, "it is a probability", below=True)] = 0.0
    """Probability, of embedding, attention output and feed-forward output; masks are the same for every
    schedule and layout."""
    tie_word_embeddings: bool = False
    """Token embedding and output head share one matrix, without weight decay as for any embedding; a run
    cannot be resumed with the other value."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.preset is not None and self.config is not None:
            why = f"the sizes are those of preset {self.preset}"
            raise ConfigError("config", str(self.config), why, "Give one of the two.")
        if self.model_type != QWEN3_MOE and self.config is None:
            why = "the sizes of such a model are in a config.json of transformers"
            raise ConfigError("model_type", self.model_type, why, "Give that file, or its folder, as config.")
        if self.head_dim is None and self.hidden_size % (2 * self.num_heads):
            valid = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % (2 * n) == 0]
            why = f"must cut hidden_size ({self.hidden_size}) into heads of an even width"
            nearest = min(valid, key=lambda n: abs(n - self.num_heads), default=None)
            hint = "Set head_dim." if nearest is None else f"Nearest valid: {nearest}; or set head_dim."
            raise ConfigError("num_heads", self.num_heads, why, hint)
        if self.head_dim is not None and self.head_dim % 2:
            why = "must be even: rotary positions turn pairs of numbers"
            raise ConfigError("head_dim", self.head_dim, why, f"Nearest valid: {self.head_dim + 1}.")
        if self.num_heads % self.key_value_heads:
            valid = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            why = f"must divide num_heads ({self.num_heads}), which share keys and values"
            nearest = min(valid, key=lambda n: abs(n - self.key_value_heads))
            raise ConfigError("num_key_value_heads", self.key_value_heads, why, f"Nearest valid: {nearest}.")
        for layer in self.moe_layers or ():
            if layer >= self.num_layers:
                why = f"layers are counted from 0 to {self.num_layers - 1}"
                raise ConfigError("moe_layers", self.moe_layers, why, f"Nearest: {self.num_layers - 1}.")

    @property
    def of_transformers(self) -> bool:
        """Whether transformers computes the model, and not Penstock's own decoder."""
        return self.model_type != QWEN3_MOE

    @property
    def key_value_heads(self) -> int:
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def attention_size(self) -> int:
        """Width of all queries together."""
        return self.num_heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """Width of all keys together, and of all values."""
        return self.key_value_heads * self.head_size

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Whether the feed-forward part of each layer is an MoE layer."""
        return tuple(self.moe_layers is None or layer in self.moe_layers for layer in range(self.num_layers))

    @property
    def dense_hidden_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size


STANDS_FOR: Final[Mapping[str, str]] = {
    "moe_layers": "has_experts",
    "num_key_value_heads": "key_value_heads",
    "head_dim": "head_size",
    "ffn_hidden_size": "dense_hidden_size",
    "norm_topk_prob": "renormalise",
}
"""Settings of [model] and [moe] whose `none` stands for a value that can also be given, and that value."""


def value_of(section: ModelConfig | MoEConfig, name: str) -> Any:
    """Return the value of a setting, or what it stands for."""
    return getattr(section, STANDS_FOR.get(name, name))


HEAD_SIZE = 64
"""Width of an attention head; the study does not give it."""

STUDY = "flowmoe/"


PRESETS = {name: model for name, model in MODELS.items() if name.startswith(STUDY)}


def sizes_of_preset(preset: PublishedModel) -> dict[str, int]:
    """Return the keys of [model]; heads have width 64, as the study does not give it."""
    return {
        "num_layers": preset.num_layers,
        "hidden_size": preset.hidden_size,
        "num_heads": preset.hidden_size // HEAD_SIZE,
        "seq_len": preset.seq_len,
    }


def experts_of_preset(preset: PublishedModel, world_size: int) -> dict[str, int | float | str | None]:
    """Return the keys of [moe]: the study scales the number of experts with the ranks."""
    return {
        "num_experts": preset.experts_per_device * world_size,
        "top_k": preset.top_k,
        "moe_ffn_hidden_size": preset.ffn_hidden_size,
        "expert": preset.expert,
        "capacity_factor": preset.capacity_factor,
    }
