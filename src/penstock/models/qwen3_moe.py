"""The decoder as Qwen3-MoE of transformers: its configuration, and names and shapes of its weights in files.

A decoder whose MoE layers do what Qwen3-MoE's do is described by a `config.json` and read by transformers as
`qwen3_moe`, without Penstock; any other is refused by the setting that Qwen3-MoE lacks. The other way round,
such a `config.json` is the configuration of a decoder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.config import UNSET, ConfigError, asked, from_dict, read_json
from penstock.models.config import QWEN3_MOE, ModelConfig, value_of
from penstock.moe import MoEConfig

CONFIG: Final = "config.json"

EXPERT: Final = re.compile(r"(?P<experts>.*\.experts)\.w_(?P<matrix>gate|up|down)\.(?P<number>\d+)")
"""Name of a matrix of one expert in checkpoints of the decoder, [M, H] or [H, M] for `x @ w`."""

ANYWAY: Final = "Every value is possible in training; only such a model cannot be one of transformers."


LACKS: Final[Mapping[str, tuple[object, str]]] = {
    "gate": ("softmax", "Qwen3-MoE's router is a softmax"),
    "expert": ("swiglu", "Qwen3-MoE's experts are SwiGLU"),
    "shared_ffn_hidden_size": (0, "Qwen3-MoE has no shared experts"),
    "num_groups": (None, "Qwen3-MoE's tokens choose among all experts"),
    "expert_bias_rate": (0.0, "Qwen3-MoE's experts have no bias in the choice"),
    "routed_scaling_factor": (1.0, "Qwen3-MoE does not scale weights"),
    "capacity_factor": (None, "Qwen3-MoE drops no tokens, so that it would compute something else"),
}
"""Settings of `[moe]` of which Qwen3-MoE has one value alone, and what it does instead of others."""


def lack_of(moe: MoEConfig) -> ConfigError | None:
    """Return an error about the first setting that Qwen3-MoE lacks; None for a decoder that is one."""
    for name, (has, why) in LACKS.items():
        if (value := getattr(moe, name)) != has:
            return ConfigError(f"moe.{name}", value, why, ANYWAY)
    return None


REQUIRED: Final = {
    "hidden_size": "model.hidden_size",
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_key_value_heads",
    "vocab_size": "model.vocab_size",
    "moe_intermediate_size": "moe.moe_ffn_hidden_size",
    "num_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.top_k",
}
"""Keys of `config.json` without which the model is not known, and the settings that they are here."""

ALSO: Final = {"num_experts": "num_local_experts"}
"""Other names of keys: transformers 5.24 writes them."""

OPTIONAL: Final = {
    "head_dim": "model.head_dim",
    "intermediate_size": "model.ffn_hidden_size",
    "rms_norm_eps": "model.rms_norm_eps",
    "tie_word_embeddings": "model.tie_word_embeddings",
    "norm_topk_prob": "moe.norm_topk_prob",
}

ONLY: Final[Mapping[str, object]] = {
    "attention_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
}
"""Keys that may have these values alone: the decoder has nothing else."""


def config_json(
    model: ModelConfig, moe: MoEConfig, *, tokenizer_digest: str | None = None, like: Path | None = None
) -> dict[str, Any]:
    """Return the content of `config.json`.

    Args:
        model: Section `[model]` of the run.
        moe: Section `[moe]`. Settings that matter in training alone are kept as `penstock_training`.
        tokenizer_digest: sha256 of the tokenizer of its text, or `bytes`.
        like: The configuration with which the run has begun, from which what training does not change is
            taken: special tokens, and how many positions the model has.

    Raises:
        ConfigError: A setting is none of Qwen3-MoE.
    """
    if (error := lack_of(moe)) is not None:
        raise error
    given = {} if like is None else _table(like)[1]
    positions = given.get("max_position_embeddings")
    sections: dict[str, ModelConfig | MoEConfig] = {"model": model, "moe": moe}
    places = {key: setting.partition(".") for key, setting in (REQUIRED | OPTIONAL).items()}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": QWEN3_MOE,
        "dtype": "float32",
        **{key: value_of(sections[section], name) for key, (section, _, name) in places.items()},
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, is_moe in enumerate(model.has_experts) if not is_moe],
        "max_position_embeddings": max(model.seq_len, positions if isinstance(positions, int) else 0),
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        **ONLY,
        "router_aux_loss_coef": moe.aux_loss_coeff,
        **{f"{name}_token_id": given.get(f"{name}_token_id") for name in ("bos", "eos", "pad")},
        "tokenizer_digest": tokenizer_digest,
        "penstock_training": {
            "dropout": model.dropout,
            "aux_loss_group": moe.aux_loss_group,
            "z_loss_coeff": moe.z_loss_coeff,
        },
    }


def in_files(name: str) -> tuple[str, bool]:
    """Return the name of a weight in files of transformers, and whether it is transposed there.

    Args:
        name: Its name in checkpoints of the decoder; that of an expert ends in `experts.w_gate.NUMBER`.
    """
    match = EXPERT.fullmatch(name)
    if match is None:
        return name, False
    return f"{match['experts']}.{match['number']}.{match['matrix']}_proj.weight", True


# ---- from a configuration of transformers ------------------------------------------------------------------


def sections_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of sections `[model]` and `[moe]` that a `config.json` stands for.

    Args:
        path: The file, or the folder in which it lies.

    Raises:
        ConfigError: The file is of another model, or says what the decoder cannot do.
    """
    file, table = _table(path)
    for key, only in ONLY.items():
        if table.get(key, only) != only:
            raise ConfigError(f"{file}: {key}", table[key], "the decoder does not have it", f"Use {only}.")
    sections: dict[str, dict[str, Any]] = {"model": {}, "moe": {}}
    for key, setting in (REQUIRED | OPTIONAL).items():
        section, _, name = setting.partition(".")
        value = table.get(key, table.get(ALSO.get(key, key)))
        if value is not None:
            sections[section][name] = value
        elif key in REQUIRED:
            raise ConfigError(
                f"{file}: {key}", UNSET, "is missing, and the model is not known without", "Add it."
            )
    theta = table.get("rope_theta", 10_000.0)  # earlier files have it outside of `rope_parameters`
    for key in ("rope_parameters", "rope_scaling"):
        rope = table.get(key) or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"{file}: {key}", rope, "must be a table", "Leave it out.")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            why = "positions of the decoder are not scaled"
            raise ConfigError(f"{file}: {key}.rope_type", kind, why, "Use default.")
        theta = rope.get("rope_theta", theta)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ConfigError(f"{file}: rope_theta", theta, "must be a number", "10000 is usual.")
    sections["model"]["rope_theta"] = float(theta)
    sections["moe"] |= {"expert": "swiglu", "norm_topk_prob": sections["moe"].get("norm_topk_prob", False)}
    checked: ModelConfig = from_dict(ModelConfig, sections["model"], "model")
    from_dict(MoEConfig, sections["moe"], "moe")
    sections["model"]["moe_layers"] = _moe_layers(table, checked.num_layers, file)
    return sections


def model_type_of(path: Path) -> str:
    """Return the architecture of a `config.json`, or of that in a folder.

    Raises:
        ConfigError: The file names none.
    """
    file = path / CONFIG if asked(path.is_dir) else path
    table = read_json(file, "Give the config.json of a model of transformers, or its folder.")
    kind = table.get("model_type", UNSET) if isinstance(table, dict) else UNSET
    if not isinstance(kind, str):
        raise ConfigError(f"{file}: model_type", kind, "must name an architecture", "Copy the file again.")
    return kind


def _table(path: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the file and the table of a Qwen3-MoE. Raises ConfigError for any other."""
    file = path / CONFIG if asked(path.is_dir) else path
    table = read_json(file, "Give the config.json of a Qwen3-MoE, or its folder.")
    if not isinstance(table, dict) or table.get("model_type") != QWEN3_MOE:
        kind = table.get("model_type", UNSET) if isinstance(table, dict) else UNSET
        why = f"the decoder is a {QWEN3_MOE}"
        raise ConfigError(f"{file}: model_type", kind, why, "Train another family with penstock.parallelize.")
    return file, table


def _moe_layers(table: Mapping[str, Any], layers: int, file: Path) -> tuple[int, ...] | None:
    """Return which layers have experts; None = all."""
    step = table.get("decoder_sparse_step", 1)
    dense = table.get("mlp_only_layers") or []
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        why = "every so many layers have experts"
        raise ConfigError(f"{file}: decoder_sparse_step", step, why, "Use 1 for all of them.")
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        why = "must be the numbers of dense layers"
        raise ConfigError(f"{file}: mlp_only_layers", dense, why, "Copy the file again.")
    moe_layers = tuple(each for each in range(layers) if each not in dense and (each + 1) % step == 0)
    if not moe_layers:
        why = f"leaves none of {layers} layers with experts"
        raise ConfigError(f"{file}: mlp_only_layers", dense, why, "Use a model with experts.")
    return None if len(moe_layers) == layers else moe_layers
