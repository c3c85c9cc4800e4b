"""Sections `[model]` and `[moe]` of a run that trains a model of transformers, from its `config.json`.

Every rank and the command itself read the file, so that a run is refused before any process starts. The model
is built for that, without memory for its weights: only transformers knows what a setting that is missing
means. The bytes of its gradients are read off it, too: an attention of latent vectors, say, has a fraction of
what one of as many heads would have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from torch import nn

from penstock.config import ConfigError, asked
from penstock.decision import GradientBytes
from penstock.extras import install, is_there, needs
from penstock.families.adapters import core_of
from penstock.families.described import (
    Held,
    check_code,
    config_of,
    empty_model,
    in_one_line,
    read_table,
    setting_of,
)
from penstock.families.inspection import Found, look
from penstock.families.known import FAMILIES, AttentionCut, Family, family_of
from penstock.models.qwen3_moe import CONFIG
from penstock.ops.work import FLOAT32_BYTES
from penstock.placement import ExpertPlacement
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS
from penstock.topology import Layout

LARGEST: Final = Held(tensors=1024, bytes=1 << 44)
"""Weights beyond those of any model that is published: nothing bears out the sizes in a file by itself."""

NO_FUNCTION: Final = (
    *("architectures", "dtype", "transformers_version", "tokenizer_digest", "use_cache", "return_dict"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "router_aux_loss_coef"),
    *("output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type"),
)
"""Settings that do not decide what a model computes from tokens."""

Sections = dict[str, dict[str, Any]]


def sections_of(path: Path) -> Sections:
    """Return the settings of a model of transformers, section by section.

    Args:
        path: Its `config.json`, or the folder in which that lies.

    Returns:
        Sections `model` and `moe`, and `family`, which says whether the model has a router loss, and how many
        positions (None = as many as one likes).

    Raises:
        ConfigError: The file describes no model of a known family, or one that cannot be scheduled.
    """
    found = described_in(path)
    try:
        sizes, coefficient, config = found.sizes, coefficient_of(found.model, found.family), found.config
        return {
            "model": {
                **sizes.model_settings([block is not None for block in found.blocks]),
                "model_type": found.family.name,
                "config_sha256": digest_of(found),
                "tie_word_embeddings": bool(found.model.config.tie_word_embeddings),
                "rms_norm_eps": setting_of(config, "rms_norm_eps", 1e-6) or 1e-6,
            },
            "moe": {
                "num_experts": found.num_experts,
                "top_k": found.top_k,
                "moe_ffn_hidden_size": sizes.moe.moe_ffn_hidden_size,
                "expert": "swiglu" if sizes.expert_matrices == 3 else "gelu",
                "shared_ffn_hidden_size": sizes.shared_width,
                "norm_topk_prob": False,
                "aux_loss_coeff": 0.0 if coefficient is None else coefficient,
                "z_loss_coeff": 0.0,
            },
            "family": {
                "router_loss": coefficient is not None,
                "positions": setting_of(config, "max_position_embeddings"),
            },
        }
    except (TypeError, ValueError) as error:
        raise ConfigError("model.config", str(path), in_one_line(error)) from error


def described_in(path: Path) -> Found:
    """Return the parts of the model that a `config.json` describes, without values; not to be changed.

    Args:
        path: The file, or the folder in which it lies.

    Raises:
        ConfigError: See `sections_of`.
    """
    file = path / CONFIG if asked(path.is_dir) else path
    return _described(file, file.read_bytes())


@lru_cache(maxsize=4)
def _described(file: Path, content: bytes) -> Found:
    """Return the parts of a file's model: a process asks for them several times."""
    del content
    if not is_there("transformers"):
        why = f"a model of another architecture than qwen3_moe {needs('transformers')}"
        raise ConfigError("model.config", str(file), why, install("transformers"))
    try:
        table = read_table(file)
        check_code(file, table)
        model = empty_model(file, config_of(file, table, LARGEST), LARGEST)
        family = family_of(model)
        if family is None:
            kind, families = table.get("model_type"), ", ".join(FAMILIES)
            why = f"is not of a family that is known ({families})"
            hint = "Load it with from_pretrained, and call penstock.parallelize, which looks at its numbers."
            raise ConfigError(f"{file}: model_type", kind, why, hint)
        found = look(model, family)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("model.config", str(file), str(error)) from error
    if changed := found.changed_code():
        why = f"{', '.join(changed)} is not the function that transformers defines"
        raise ConfigError("model.config", str(file), why, "Load the model, and call penstock.parallelize.")
    return found


def digest_of(found: Found) -> str:
    """Return the sha256 of what decides which function a model computes."""
    config, coefficient = found.model.config, found.family.coefficient or ""
    free = {*NO_FUNCTION, coefficient.rpartition(".")[2]}  # training may change the weight of the router loss
    whole: dict[str, Any] = json.loads(config.to_json_string())  # without usual values
    table = {key: value for key, value in whole.items() if key not in free and not key.startswith("_")}
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def coefficient_of(model: Any, family: Family) -> float | None:
    """Return the weight that a model gives its router loss; None if it has none."""
    name = family.coefficient
    if name is None or not hasattr(model, name.partition(".")[0]):
        return None
    return float(attrgetter(name)(model))


DENSE_ROWS, DENSE_COLUMN = ("gate_proj", "up_proj"), "down_proj"
"""Linear layers of a dense part, which ranks that share attention cut by its width."""


@dataclass(frozen=True)
class _Layer:
    """Bytes of the parameters of a layer, whole or on one rank.

    Attributes:
        cut: Bytes of weights of which ranks that share attention have each a part.
        inner: Bytes of whole parameters that compute before or beside shards of weights.
        tokens: Bytes of whole parameters that compute on tokens one by one after attention.
        experts: Bytes of experts.
    """

    cut: int
    inner: int
    tokens: int
    experts: int


def gradient_bytes_of(path: Path, layout: Layout, shape: StepShape, *, edp: bool) -> GradientBytes:
    """Return the bytes of every layer's reduced gradients, by kind.

    Args:
        path: The `config.json`, or its folder.
        layout: The place of a rank; all hold as much.
        shape: The uncut shape of a step.
        edp: Whether experts have replicas, over which their gradients are reduced, too.
    """
    found = described_in(path)
    held, places = _held(found, layout), found.num_experts * layout.etp_size
    layers = [  # of one rank
        replace(layer, cut=layer.cut // layout.tp_size, experts=layer.experts // places * held)
        for layer in _whole(found)
    ]
    forms = FORM_TOKENS if layout.tp_size > 1 else ()
    whole = tuple(layer.cut + layer.inner + layer.tokens for layer in layers)
    partial = _partial(layers, shape) if forms else (0,) * len(layers)
    return GradientBytes(
        tuple(all_ - part for all_, part in zip(whole, partial, strict=True)),
        tuple(layer.experts if edp else 0 for layer in layers),
        partial,
        tuple((form, _partial(layers, replace(shape, expert_form=form))) for form in forms),
        max(layer.experts for layer in layers) // _held(found, layout),
    )


def _held(found: Found, layout: Layout) -> int:
    """Return how many experts of a layer a rank holds."""
    return ExpertPlacement.even(found.num_experts, layout.ep_size).slots


def _partial(layers: list[_Layer], shape: StepShape) -> tuple[int, ...]:
    """Return the bytes to which every rank that shares attention adds a part, by layer."""
    return tuple(
        layer.inner + layer.tokens * (shape.tokens_of(number) == "split" or shape.copies_differ)
        for number, layer in enumerate(layers)
    )


@lru_cache(maxsize=4)  # planning asks for the same model in dozens of layouts
def _whole(found: Found) -> list[_Layer]:
    """Return the bytes of every layer, all of its experts included."""
    seen: set[int] = set()

    def fresh(parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes, of float32 at least, of trained parameters that no layer has had before."""
        total = 0
        for parameter in parameters:
            size = max(FLOAT32_BYTES, parameter.element_size()) * parameter.numel()
            total += size if parameter.requires_grad and id(parameter) not in seen else 0
            seen.add(id(parameter))
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
        whole: list[Any] = [base.get_submodule(found.family.norm)] if last else []
        if cut is not None:  # the rest of attention and of a dense part, and the norm before attention
            dense = found.family.block if block is None else None
            whole += map(layer.get_submodule, filter(None, (cut.module, cut.norm, dense)))
        inner = fresh(parameter for module in whole for parameter in module.parameters())
        layers.append(_Layer(shared, inner, fresh(layer.parameters()), of_experts))
    rest = fresh(model.parameters())  # what no layer uses is reduced with the first
    layers[0] = replace(layers[0], tokens=layers[0].tokens + rest)
    return layers


def _cut(layer: Any, block: Any, cut: AttentionCut, dense: str) -> list[nn.Parameter]:
    """Return the weights of a layer of which ranks that share attention have each a part."""
    attention = layer.get_submodule(cut.module)
    parameters = [attention.get_parameter(name) for name in cut.heads]
    linear = [(attention, cut.rows, cut.columns)]
    if block is None:
        linear.append((layer.get_submodule(dense), DENSE_ROWS, (DENSE_COLUMN,)))
    for module, rows, columns in linear:
        parameters += map(module.get_parameter, of_linear(module, rows, columns))
    return parameters


def of_linear(module: nn.Module, rows: Sequence[str], columns: Sequence[str]) -> dict[str, int]:
    """Return along which dimension the parameters of linear layers are cut, those that there are."""
    dims: dict[str, int] = {}
    for name in rows:
        if isinstance(linear := getattr(module, name, None), nn.Linear):
            dims |= {f"{name}.{own}": 0 for own, _ in linear.named_parameters()}
    return {**dims, **{f"{name}.weight": 1 for name in columns}}  # a bias is added once, and is whole
