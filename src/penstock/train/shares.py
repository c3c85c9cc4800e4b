"""Checks whether what ranks share can be cut into equal parts, before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.config import ConfigError, IndivisibleError
from penstock.mesh import group_sizes
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.topology import ParallelConfig
from penstock.train.of_family import check_layout


def check_shares(model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig, ranks: int) -> None:
    """Raise IndivisibleError, with the nearest valid size, for a size that does not divide what it cuts.

    ranks: total number; sizes of groups that these cannot form are not proposed. Raises ConfigError for more
    ranks than a sample has tokens.
    """
    if model.of_transformers:
        check_layout(model.model_type, parallel)
    shared = {
        "model.num_heads": model.num_heads,
        "model.num_key_value_heads": model.key_value_heads,
        "model.vocab_size": model.vocab_size,
    }
    if not all(model.is_moe(layer) for layer in range(model.num_layers)):
        shared["model.ffn_hidden_size"] = model.dense_hidden_size
    valid = [size for size in _common(shared, ranks) if size <= model.seq_len]
    _check("parallel.mp_size", parallel.mp_size, shared, valid, heads_of=model.hidden_size)
    if parallel.mp_size > model.seq_len:
        why = f"every rank needs a token of each sample, and samples have model.seq_len = {model.seq_len}"
        nearest = f"Nearest valid: {_nearest(valid, parallel.mp_size)}."
        raise ConfigError("parallel.mp_size", parallel.mp_size, why, nearest)
    experts = {"moe.moe_ffn_hidden_size": moe.moe_ffn_hidden_size}
    _check("parallel.esp_size", parallel.esp_size, experts, _common(experts, ranks))


def _check(key: str, parts: int, shared: Mapping[str, int], valid: list[int], *, heads_of: int = 0) -> None:
    """Raise IndivisibleError unless `parts` divides all of `shared`.

    valid: sizes to propose. heads_of: the hidden size, which a number of heads must divide.
    """
    for name, number in shared.items():
        if number % parts:
            why = f"must divide {name} ({number}), which is cut into as many equal parts"
            multiples = list(range(parts, number + parts + 1, parts))
            if name == "model.num_heads":
                multiples = [heads for heads in multiples if heads_of % heads == 0]
            other = f"; or {name}={_nearest(multiples, number)}" if multiples else ""
            raise IndivisibleError(key, parts, why, f"Nearest valid: {_nearest(valid, parts)}{other}.")


def _common(shared: Mapping[str, int], ranks: int) -> list[int]:
    """Return the sizes of groups of ranks that divide all of these numbers."""
    return [size for size in group_sizes(ranks) if all(each % size == 0 for each in shared.values())]


def _nearest(valid: Iterable[int], to: int) -> int:
    return min(valid, key=lambda each: (abs(each - to), each))
