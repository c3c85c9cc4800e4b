"""Bytes of the gradients of a model of transformers, from its `config.json`, before there is a rank.

They are those that the ranks of a run find in their parameters. An attention of latent vectors, say, has a
fraction of what one of as many heads would have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from penstock.decision import GradientBytes
from penstock.families.adapters import core_of
from penstock.families.family import AttentionCut
from penstock.families.inspection import Found
from penstock.families.sections import described_in
from penstock.placement import ExpertPlacement
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS
from penstock.topology import Layout

FLOAT32_BYTES = 4
DENSE_ROWS, DENSE_COLUMN = ("gate_proj", "up_proj"), "down_proj"
"""Linear layers of a dense part, which ranks that share attention cut by its width."""


@dataclass(frozen=True)
class _Layer:
    """Bytes of the parameters of a layer, whole or on one rank.

    Attributes:
        cut: Of weights of which ranks that share attention have each a part.
        inner: Of whole parameters that compute before shards of weights.
        tokens: Of whole parameters that compute on tokens one by one after attention.
        experts: Of experts.
    """

    cut: int
    inner: int
    tokens: int
    experts: int


def gradient_bytes_of(path: Path, layout: Layout, shape: StepShape, *, edp: bool) -> GradientBytes:
    """Return the bytes of every layer's reduced gradients, by kind.

    Args:
        path: The `config.json`, or its folder.
        layout: Of the ranks.
        shape: The uncut shape of a step.
        replicas: Whether experts are reduced, too.
    """
    found = described_in(path)
    held, places = _held(found, layout), found.num_experts * layout.etp_size
    layers = [  # of one rank
        replace(each, cut=each.cut // layout.tp_size, experts=each.experts // places * held)
        for each in _whole(found)
    ]
    forms = FORM_TOKENS if layout.tp_size > 1 else ()
    whole = tuple(each.cut + each.inner + each.tokens for each in layers)
    partial = _partial(layers, shape) if forms else (0,) * len(layers)
    return GradientBytes(
        tuple(all_ - part for all_, part in zip(whole, partial, strict=True)),
        tuple(each.experts if edp else 0 for each in layers),
        partial,
        tuple((form, _partial(layers, replace(shape, expert_form=form))) for form in forms),
        max(each.experts for each in layers) // _held(found, layout),
    )


def _held(found: Found, layout: Layout) -> int:
    """Return how many experts of a layer a rank holds."""
    return ExpertPlacement.even(found.num_experts, layout.ep_size).slots


def _partial(layers: list[_Layer], shape: StepShape) -> tuple[int, ...]:
    """Return the bytes to which every rank that shares attention adds a part, by layer."""
    return tuple(
        each.inner + each.tokens * (shape.tokens_of(number) == "split" or shape.copies_differ)
        for number, each in enumerate(layers)
    )


@lru_cache(maxsize=4)  # planning asks for the same model in dozens of layouts
def _whole(found: Found) -> list[_Layer]:
    """Return the bytes of every layer, all of its experts included."""
    seen: set[int] = set()

    def fresh(parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of trained parameters that no layer has had before: a run's are float32 at
        least."""
        total = 0
        for each in parameters:
            size = max(FLOAT32_BYTES, each.element_size()) * each.numel()
            total += size if each.requires_grad and id(each) not in seen else 0
            seen.add(id(each))
        return total

    cut, model = found.family.attention, found.model
    layers: list[_Layer] = []
    for number, (layer, block) in enumerate(zip(found.layers, found.blocks, strict=True)):
        last, base = number == len(found.layers) - 1, found.family.decoder(model)
        experts = [] if block is None else list(core_of(found.family.experts_of(block)).parameters())
        of_experts = fresh(experts)
        vocabulary = list(model.get_input_embeddings().parameters()) if number == 0 else []
        vocabulary += model.get_output_embeddings().parameters() if last else []
        parts = [] if cut is None else _cut(layer, block, cut, found.family.block)
        shared = fresh([*parts, *vocabulary])
        norm = list(base.get_submodule(found.family.norm).parameters()) if last else []
        inner = fresh([*([] if cut is None else _inner(layer, cut)), *norm])
        layers.append(_Layer(shared, inner, fresh(layer.parameters()), of_experts))
    rest = fresh(model.parameters())  # what no layer uses is reduced with the first
    layers[0] = replace(layers[0], tokens=layers[0].tokens + rest)
    return layers


def _cut(layer: Any, block: Any, cut: AttentionCut, dense: str) -> list[nn.Parameter]:
    """Return the weights of a layer of which ranks that share attention have each a part."""
    attention = layer.get_submodule(cut.module)
    found = [attention.get_parameter(name) for name in cut.heads]
    linear = [(attention, cut.rows, cut.columns)]
    if block is None:
        linear.append((layer.get_submodule(dense), DENSE_ROWS, (DENSE_COLUMN,)))
    for module, rows, columns in linear:
        for each in filter(None, (getattr(module, name, None) for name in rows)):
            found += each.parameters()
        found += [getattr(module, name).weight for name in columns]  # a bias is added once, and is whole
    return found


def _inner(layer: Any, cut: AttentionCut) -> list[nn.Parameter]:
    """Return the whole parameters of attention, and of the norm before it."""
    norm = [] if cut.norm is None else list(layer.get_submodule(cut.norm).parameters())
    return [*layer.get_submodule(cut.module).parameters(), *norm]
