"""Sections `[model]` and `[moe]` of a run that trains a model of transformers, from its `config.json`.

Every rank and the command itself read the file, so that a run is refused before any process starts. The model
is built for that, without memory for its weights: only transformers knows what a setting that is missing
means.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from penstock.config import ConfigError, asked
from penstock.extras import install, is_there, needs
from penstock.families.described import config_of, empty_model, in_one_line, read_table, setting_of
from penstock.families.inspection import Found, look
from penstock.families.known import FAMILIES, family_of
from penstock.families.limits import Held, check_code
from penstock.models.qwen3_moe import CONFIG

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
    """Return the settings of sections `[model]` and `[moe]` that a model of transformers has, and `family`:
    whether it has a router loss, and how many positions (None: as many as one likes).

    Args:
        path: Its `config.json`, or the folder in which that lies.

    Raises:
        ConfigError: The file describes no model of a known family, or one that cannot be scheduled.
    """
    found = described_in(path)
    try:
        return _sections(found)
    except (TypeError, ValueError) as error:
        raise ConfigError("model.config", str(path), in_one_line(error)) from error


def _sections(found: Found) -> Sections:
    sizes, coefficient, config = found.sizes, coefficient_of(found), found.config
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
            kind, known = table.get("model_type"), ", ".join(FAMILIES)
            why = f"is not of a family that is known ({known})"
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


def coefficient_of(found: Found) -> float | None:
    """Return the weight that a model gives its router loss; None if it has none."""
    name = found.family.coefficient
    if name is None or not hasattr(found.model, name.partition(".")[0]):
        return None
    return float(attrgetter(name)(found.model))
