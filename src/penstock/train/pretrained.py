"""Training that begins with the weights in a folder of transformers, `model.config` of a run."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.checkpoint.folder import INDEX, ONE, DamagedError, model_files
from penstock.checkpoint.storage import (
    NOT_FINITE,
    SUFFIX,
    Part,
    Stored,
    first_not_finite,
    misfits,
    tensors_in,
)
from penstock.config import ConfigError
from penstock.models import MoEDecoder
from penstock.models.meta import on_meta
from penstock.topology import Control
from penstock.train.run_state import DecoderNaming, of_model

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HEAD = "lm_head.weight"
READING = "reading the weights in model.config"
COPY = "Copy the folder again, or begin with fresh weights: give the path of its config.json alone."


def files_of(path: Path) -> list[str]:
    """Return the files with the weights in `model.config`; [] for a `config.json` alone.

    Raises:
        ConfigError: There are weights, and not in files that can be read.
    """
    if not path.is_dir():
        return []
    if found := model_files(path):
        return found
    if strange := sorted(each.name for each in path.iterdir() if each.suffix in (SUFFIX, ".bin", ".pth")):
        why = f"holds {strange[0]}, and neither {ONE} nor {INDEX}, by which weights are found"
        raise ConfigError("model.config", str(path), why, COPY)
    return []


def begin_with(decoder: MoEDecoder, path: Path | None, control: Control) -> None:
    """Give a decoder the weights in `model.config`, if it has any. All ranks call it.

    Raises:
        ConfigError: On all ranks, if one cannot read them, or has other files than rank 0.
    """
    if path is not None and same_files(path, control):
        control.agreed(lambda: read_weights(decoder, path), READING)


def same_files(path: Path, control: Control) -> list[str]:
    """Return the files with the weights in `model.config`, the same on all ranks, which call it together.

    Raises:
        ConfigError: On all ranks, if one cannot read them, or has other files than rank 0.
    """
    found: list[str] = []
    control.agreed(lambda: found.extend(files_of(path)), READING)
    everyone = control.gather(found, READING)
    for rank, files in enumerate(everyone):
        if files != everyone[0]:
            why = f"holds {everyone[0] or 'no weights'} on rank 0, and on rank {rank} {files or 'no weights'}"
            raise ConfigError("model.config", str(path), why, "Give all machines the same folder.")
    return found


def read_weights(decoder: MoEDecoder, folder: Path) -> None:
    """Give this rank's part of a decoder the weights in a folder; of the files it reads that part alone.

    Where `folder` is a `config.json`, or holds nothing else, the decoder stays as it is.

    Args:
        decoder: On this rank, on any layout.
        folder: As `save_pretrained` or a run writes a Qwen3-MoE.

    Raises:
        ConfigError: Of `model.config`, if the folder holds the weights of another model, or damaged ones.
    """
    if not (files := files_of(folder)):
        return
    with on_meta():
        of_all = DecoderNaming(MoEDecoder(decoder.config, decoder.moe)).in_files()
        whole = {name: Part.of(part) for name, part, _ in of_all}
    state = {name: Part.of(part, sharding) for name, part, sharding in DecoderNaming(decoder).in_files()}
    try:
        stored = Stored(folder, files, others=True)
        held = {name: each for name, each in stored.whole.items() if of_model(name)}
        if decoder.config.tie_word_embeddings:
            held.pop(HEAD, None)
        if (found := misfits(whole, held, whole, TYPES)) is not None:
            why = f"is the folder of another model: {found}"
            raise ConfigError("model.config", str(folder), why, COPY)
        stored.load(state)
        if (broken := first_not_finite(tensors_in(state))) is not None:
            raise DamagedError(f"{broken} {NOT_FINITE}")
    except (DamagedError, OSError) as error:
        why = f"its weights cannot be read: {error}"
        raise ConfigError("model.config", str(folder), why, COPY) from error
