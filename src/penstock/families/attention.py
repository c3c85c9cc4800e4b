"""What attention of a model multiplies and compares, and the widths of its feed-forward parts, read off its
modules: so it holds for latent vectors, layers without heads, and whatever else a family has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from torch import nn

from penstock.cost.workload import Attention, Reach
from penstock.families.described import setting_of

FORMS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers with heads that look back a limited number of tokens, and the setting that says it."""

STATES = ("linear_attention", "mamba", "mamba2")
"""Kinds of layers that keep a state instead of keys."""

STATELESS = ("conv", "moe", "mlp")
"""Kinds of layers that neither compare tokens nor keep a state."""

STATE_SIZES = ("linear_key_head_dim", "mamba_d_state", "ssm_state_size")
USUAL_STATE = 128


def matrices_of(module: nn.Module, without: Iterable[nn.Module | None] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a module's matrices, whole ones where this rank has a part, but for those of the
    modules `without`."""
    seen = {id(each) for other in without if other is not None for each in other.parameters()}
    for part in module.modules():
        cuts = getattr(part, "shardings", {})
        for name, each in part.named_parameters(recurse=False):
            if each.dim() > 1 and id(each) not in seen:
                seen.add(id(each))
                yield tuple(cuts[name].shape if name in cuts else each.shape)


def attention_of(config: Any, layers: Sequence[Any], others: Sequence[Sequence[Any]]) -> Attention:
    """Return the attention of a model.

    Args:
        config: Of its text part.
        layers: Of its decoder.
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
