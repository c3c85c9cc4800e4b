"""A folder of transformers, opened if its files bear each other out, and the model that is read from it.

transformers itself reads no file in it but config.json: adapters, code and settings that lead elsewhere are
not followed. In place of a folder a model may be named as on the Hugging Face hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.config import UNSET, ConfigError
from penstock.families.described import (
    config_of,
    empty_model,
    in_one_line,
    quiet,
    read_description,
    read_generation,
)
from penstock.families.limits import COPY
from penstock.families.weights import StoredTensor, held_by, refuse_incompatible, stored_tensors
from penstock.models.qwen3_moe import CONFIG


@dataclass(frozen=True)
class ModelFolder:
    """The files of a model. model: without values, of its text part if it also sees or hears."""

    path: Path
    model: Any
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: Path, kind: Any = None) -> ModelFolder:
        """Open a folder. kind: the model's class; None: a causal language model.

        Raises ValueError, naming a file, if it holds no such model.
        """
        import transformers  # noqa: F401  # where it is missing, that is said first

        table = read_description(path)
        if pipe := next((file for file in path.iterdir() if file.is_fifo()), None):  # reading would wait
            raise ConfigError(str(pipe), UNSET, "is a pipe, not a file", f"{COPY}.")
        tensors = stored_tensors(path)
        held = held_by(tensors)
        file = path / CONFIG
        model = empty_model(file, config_of(file, table, held), held, kind)
        return cls(path, model, tensors)

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model by its configuration, or of its first tensor, or float32."""
        found: torch.dtype | None = self.config.dtype or next(iter(self.tensors.values())).dtype
        return torch.float32 if found is None else found

    def read(self, kind: Any, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> Any:
        """Return a model of this class with values of these tensors.

        Raises ValueError if a tensor is missing, or is not the model's: transformers would draw it by chance.
        """
        generation = read_generation(self.path)
        try:
            with quiet():
                model, loading = kind.from_pretrained(
                    None,
                    config=self.config,
                    state_dict=dict(tensors),
                    dtype=dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are reported, and refused below
                )
        except ConfigError:
            raise
        except Exception as error:  # whatever a model's own code raises
            raise ValueError(f"{self.path}: its model cannot be read: {in_one_line(error)}") from error
        refuse_incompatible(self.path, loading)
        model.config._name_or_path = str(self.path)
        if generation is not None:
            model.generation_config = generation
        return model


NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""Name of a model on the hub: its owner and its own."""

WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
"""Names of files that a model and its tokenizer are read from."""


def folder_of(named: str | Path) -> Path:
    """Return the folder that is named, or that of the files of a model on the hub, which is named as there.

    They come from the library's cache (`HF_HOME`), where they are downloaded to if they are not there. Ranks
    of a node wait for each other's files. Raises ValueError where the hub gives no such model.
    """
    path = Path(named)
    if path.exists() or isinstance(named, Path) or not NAME.fullmatch(named):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(named, allow_patterns=list(WANTED), ignore_patterns=["*/*"]))
    except Exception as error:  # those of the library and of several libraries below it
        raise ValueError(
            f"{named} is no folder here, and the Hugging Face hub does not give a model of this name: "
            f"{in_one_line(error)}"
        ) from error
