"""Runs of models of transformers: what their `config.json` decides, and which settings they do not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from penstock.config import ConfigError
from penstock.data import DataConfig
from penstock.decision import PlacementConfig
from penstock.families.known import FAMILIES
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.topology import ParallelConfig

FREE: Final = {
    "model": ("config", "seq_len"),
    "moe": ("dispatch", "compression", "bound_factor", "aux_loss_coeff"),
}
"""Settings of a model that its file does not decide."""


def check_sections(
    path: Path, sections: Mapping[str, Mapping[str, Any]], model: ModelConfig, moe: MoEConfig
) -> None:
    """Raise ConfigError for a setting that is not the file's, or that the model does not have.

    Args:
        path: The model's `config.json` or its folder.
        sections: What the file decides.
        model: With the file's settings laid under the user's.
        moe: Likewise.
    """
    for name, section in (("model", model), ("moe", moe)):
        for field in fields(section):
            value, decided = getattr(section, field.name), sections[name].get(field.name, field.default)
            if field.name not in FREE[name] and value != decided:
                why = f"the model is that of {path}, and there it is {decided}"
                hint = f"Leave it out, or make another {path.name}."
                raise ConfigError(f"{name}.{field.name}", value, why, hint)
    if moe.aux_loss_coeff and not sections["family"]["router_loss"]:
        why = f"the model of {path} has no router loss"
        raise ConfigError("moe.aux_loss_coeff", moe.aux_loss_coeff, why, "Leave it out.")
    positions = sections["family"]["positions"]
    if positions is not None and model.seq_len > positions:
        why = f"the model of {path} has {positions} positions"
        raise ConfigError("model.seq_len", model.seq_len, why, f"Use {positions} or fewer.")


def check_features(model_type: str, placement: PlacementConfig, data: DataConfig) -> None:
    """Raise ConfigError for a feature of a run that models of this family do not have."""
    if placement.experts not in ("auto", "none") and not FAMILIES[model_type].form.moves:
        why = f"a parameter of a {model_type} has several rows for every expert, which are not moved"
        raise ConfigError("placement.experts", placement.experts, why, "Use none.")
    if data.separate_documents and not FAMILIES[model_type].separates_documents:
        why = f"a {model_type} goes on where another document begins, in some layers at least"
        raise ConfigError("data.separate_documents", True, why, "Leave it out.")


def check_layout(model_type: str, parallel: ParallelConfig) -> None:
    """Raise ConfigError for a layout in which ranks would share what models of this family do not share."""
    family = FAMILIES[model_type]
    if parallel.esp_size > 1 and not family.form.narrows:
        why = f"a parameter of a {model_type} has several rows for every expert, which are not cut"
        raise ConfigError("parallel.esp_size", parallel.esp_size, why, "Use 1, and spread them with ep_size.")
    if parallel.mp_size > 1 and family.attention is None:
        why = f"{family.uncut}, so ranks cannot share the attention of a {model_type}"
        raise ConfigError("parallel.mp_size", parallel.mp_size, why, "Use 1.")


def staying(model_type: str, placement: PlacementConfig) -> PlacementConfig:
    """Return the section for a model of this family, where experts that cannot move stay."""
    return placement if FAMILIES[model_type].form.moves else replace(placement, experts="none")
