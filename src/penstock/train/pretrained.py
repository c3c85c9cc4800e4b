"""Training that begins with the weights in a folder of transformers, `model.config` of a run."""

from __future__ import annotations

from pathlib import Path

from penstock.checkpoint.folder import DamagedError
from penstock.checkpoint.storage import INDEX, SUFFIX, Part, Stored
from penstock.config import ConfigError
from penstock.models import MoEDecoder
from penstock.models.meta import on_meta
from penstock.train.run_state import model_tensors, of_model

ONE = "model.safetensors"
HEAD = "lm_head.weight"
MOST_NAMED = 4
COPY = "Copy the folder again, or begin with fresh weights: give the path of its config.json alone."


def has_weights(path: Path) -> bool:
    """Return whether a path is a folder that holds weights."""
    return path.is_dir() and any((path / name).exists() for name in (ONE, INDEX))


def read_weights(decoder: MoEDecoder, folder: Path) -> None:
    """Give this rank's part of a decoder the weights in a folder; of the files it reads that part alone.

    Args:
        decoder: On this rank, on any layout.
        folder: As `save_pretrained` or a run writes a Qwen3-MoE.

    Raises:
        ConfigError: Of `model.config`, if the folder holds the weights of another model, or damaged ones.
    """
    state = {name: Part.of(part, sharding) for name, part, sharding in model_tensors(decoder)}
    try:
        stored = Stored(folder, [path.name for path in folder.glob(f"*{SUFFIX}")])
        _check(decoder, folder, {name: shape for name, (shape, _) in stored.whole.items() if of_model(name)})
        stored.load(state)
    except (DamagedError, OSError) as error:
        why = f"its weights cannot be read: {error}"
        raise ConfigError("model.config", str(folder), why, COPY) from error


def _check(decoder: MoEDecoder, folder: Path, held: dict[str, tuple[int, ...]]) -> None:
    """Raise ConfigError unless a folder holds the tensors of the whole decoder, and no others."""
    with on_meta():
        wanted = {
            name: part.shape for name, part, _ in model_tensors(MoEDecoder(decoder.config, decoder.moe))
        }
    if decoder.config.tie_word_embeddings:
        held.pop(HEAD, None)
    misshapen = {name for name in wanted.keys() & held.keys() if wanted[name] != held[name]}
    for what, names in (
        ("lacks", wanted.keys() - held.keys()),
        ("also holds", held.keys() - wanted.keys()),
        ("has in another shape", misshapen),
    ):
        if names:
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            named = ", ".join(sorted(names)[:MOST_NAMED])
            why = f"is the folder of another model: it {what} {named}{more}"
            raise ConfigError("model.config", str(folder), why, COPY)
