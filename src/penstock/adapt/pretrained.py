"""Training of Penstock's decoder that begins with the weights in a folder of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.adapt.weights import INDEX, ONE, StoredTensor, some_of, stored_tensors
from penstock.config import ConfigError
from penstock.models import MoEDecoder
from penstock.models.meta import on_meta
from penstock.models.qwen3_moe import in_files
from penstock.sharding import shardings_of

HEAD = "lm_head.weight"
COPY = "Copy the folder again, or begin with fresh weights: give the path of its config.json alone."


def has_weights(path: Path) -> bool:
    """Return whether a path, `model.config` of a run, is a folder that holds weights."""
    return path.is_dir() and any((path / name).exists() for name in (ONE, INDEX))


def read_weights(decoder: MoEDecoder, folder: Path) -> None:
    """Give this rank's part of a decoder the weights in a folder.

    Tensors are read one by one: a rank needs memory for the largest one beside the model.

    Args:
        decoder: On this rank, on any layout.
        folder: As `save_pretrained` writes a Qwen3-MoE.

    Raises:
        ConfigError: Of `model.config`, if the folder holds the weights of another model.
    """
    try:
        tensors = stored_tensors(folder)
    except ValueError as error:
        raise ConfigError(
            "model.config", str(folder), f"its weights cannot be read: {error}", COPY
        ) from error
    _check_names(decoder, folder, tensors)
    shardings = shardings_of(decoder)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            for logical, part in decoder.logical(name, parameter):
                there, transposed = in_files(logical)
                read = tensors[there][...]
                whole = read.t().contiguous() if transposed else read
                sharding = shardings.get(name)
                if tuple(whole.shape) != (tuple(part.shape) if sharding is None else sharding.shape):
                    why = f"{there} there has shape {list(read.shape)}, which is that of another model"
                    raise ConfigError("model.config", str(folder), why, COPY)
                part.copy_(whole if sharding is None else sharding.part(whole))


def _check_names(decoder: MoEDecoder, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ConfigError unless a folder holds the tensors of the whole decoder, and no others."""
    with on_meta():
        whole = MoEDecoder(decoder.config, decoder.moe)
    wanted = {in_files(each)[0] for named in whole.named_parameters() for each, _ in whole.logical(*named)}
    held = set(tensors) - ({HEAD} if decoder.config.tie_word_embeddings else set())
    for what, names in (("lacks", wanted - held), ("also holds", held - wanted)):
        if names:
            why = f"is the folder of another model: it {what} {some_of(sorted(names))}"
            raise ConfigError("model.config", str(folder), why, COPY)
