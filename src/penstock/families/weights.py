"""Weights in a folder of safetensors files, read tensor by tensor on demand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint.folder import INDEX, ONE, model_files
from penstock.checkpoint.storage import NOT_FINITE, first_not_finite
from penstock.config import UNSET, ConfigError
from penstock.families.described import refuse_cut_off
from penstock.families.limits import COPY, Held
from penstock.models.qwen3_moe import CONFIG
from penstock.words import some_of

TEXT = "language_model."
BESIDE_TEXT = ("vision_model.", "vision_tower.", "multi_modal_projector.", "audio_tower.")
"""Beginnings of names in a model that also sees or hears: in its text part, and in others."""

EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""Pattern in the name of a tensor that belongs to one expert."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types in which models compute, by their names in safetensors."""

QUANTIZED = ("F4", "F6", "F8", "I8", "U8")
"""Beginnings of the names of such types: F8_E4M3 and the like."""

LAYER = re.compile(r".*?\.\d+\.")
"""Beginning of the names of all tensors of a layer."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, of which `rows` are wanted: transformers reads it by `[...]`, once, as it loads.

    shape: of the whole tensor. kind: of its numbers, as safetensors calls it. rows: None = all.
    """

    file: Path
    name: str
    shape: Sequence[int]
    kind: str
    rows: slice | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of its numbers; None if it is none of those in which models compute."""
        return DTYPES.get(self.kind)

    def __getitem__(self, everything: Any) -> Tensor:
        """Read the values into memory of their own: the file is closed again.

        Raises ConfigError, naming file and tensor, if one of them is not finite.
        """
        del everything
        with safe_open(self.file, framework="pt") as opened:
            stored: Any = opened.get_slice(self.name)
            read: Tensor = (stored[...] if self.rows is None else stored[self.rows]).clone()
        if first_not_finite([(self.name, read)]) is not None:
            raise ConfigError(str(self.file), UNSET, f"{self.name} {NOT_FINITE}", f"{COPY}.")
        return read


def quantized_in(tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the name of a tensor with numbers of a byte or less, as weights are only stored; or None."""
    return next((n for n, each in tensors.items() if each.kind.partition("_")[0] in QUANTIZED), None)


def held_by(tensors: Mapping[str, StoredTensor]) -> Held:
    """Return how much the weights of a folder are."""
    return Held(len(tensors), sum(file.stat().st_size for file in {each.file for each in tensors.values()}))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, by name; of a model that also sees or hears, those of its text part.

    Raises ValueError if the folder holds no complete set of safetensors.
    """
    files = [folder / name for name in model_files(folder)]
    if not files:
        refuse_cut_off(folder)
        raise ValueError(
            f"{folder} holds neither {ONE} nor {INDEX}. Give a folder that save_pretrained has written, or "
            "download the model's files first: hf download NAME --local-dir FOLDER"
        )
    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # no dictionary
                    if not name.startswith(BESIDE_TEXT):
                        stored: Any = opened.get_slice(name)
                        found[name.removeprefix(TEXT)] = StoredTensor(
                            file=file, name=name, shape=stored.get_shape(), kind=stored.get_dtype()
                        )
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}. {COPY}") from error
    if not found:
        raise ValueError(f"{', '.join(map(str, files))}: no tensors are in there. {COPY}")
    return found


def share_of_experts(
    tensors: Mapping[str, StoredTensor],
    model: Any,
    stacked: Mapping[str, int],
    held: Sequence[int],
    num_experts: int,
) -> dict[str, StoredTensor]:
    """Return the tensors of a whole model that a rank needs: of experts only `held`, which are consecutive.

    model: on any device, for its names. stacked: by the name of every parameter that holds experts, the
    number of its rows that belong to one. Raises ValueError, on all ranks, unless there are num_experts
    experts of every kind: a rank itself looks at its own ones alone.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    names = model.state_dict()
    wanted: dict[str, StoredTensor] = {}
    numbers: dict[str, set[int]] = {}
    wrong: list[str] = []
    for name, tensor in tensors.items():
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        rows = stacked.get(name if name in stacked else target)
        number = EXPERT.search(name)
        if rows is None:
            wanted[name] = tensor
        elif number is None:
            if tensor.shape[0] != num_experts * rows:
                wrong.append(f"{name} {tensor.shape}")
            first = held[0] * rows
            wanted[name] = replace(tensor, rows=slice(first, first + len(held) * rows))
        else:
            numbers.setdefault(EXPERT.sub(".experts.*.", name), set()).add(int(number[1]))
            if int(number[1]) in held:
                wanted[name] = tensor
    for name, found in numbers.items():
        if missing := set(range(num_experts)) - found:
            wrong.append(f"{name} of all experts but {some_of(sorted(map(str, missing)))}")
        if surplus := found - set(range(num_experts)):
            wrong.append(f"{name} of expert {some_of(sorted(map(str, surplus)))}")
    if wrong:
        folder = next(iter(tensors.values())).file.parent
        raise ValueError(
            f"{folder} does not hold the {num_experts} experts of its {CONFIG}: it has {some_of(wrong)}. "
            f"Copy the weights and {CONFIG} from one place"
        )
    return wanted


def refuse_misfits(folder: Path, told: Mapping[str, Any]) -> None:
    """Raise ValueError if transformers reports tensors that are missing, unexpected or misshapen."""
    misshapen = [
        f"{name} ({list(stored)} there, {list(wanted)} by {CONFIG})"
        for name, stored, wanted in told["mismatched_keys"]
    ]
    unexpected = [name for name in told["unexpected_keys"] if not name.startswith(BESIDE_TEXT)]
    found = {"missing": told["missing_keys"], "unexpected": unexpected, "misshapen": misshapen}
    problems = [f"{what}: {some_of(sorted(map(str, names)))}" for what, names in found.items() if names]
    if problems:
        raise ValueError(
            f"{folder} does not hold the model of its {CONFIG}: {'; '.join(problems)}. Copy the weights and "
            f"{CONFIG} from one place"
        )
