"""A folder of transformers that is written as a whole: old files stay until all new ones are on disk."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from penstock.adapt.engine import Engine
from penstock.adapt.export import whole_state
from penstock.adapt.saving import Writing
from penstock.checkpoint.folder import INDEX, ONE
from penstock.checkpoint.storage import together
from penstock.families.described import FORMER, quiet
from penstock.partial_state import without_marks
from penstock.writing import make_durable, write_whole

UNFINISHED = ".unfinished-model"
"""Subfolder for files that are being written."""

SEEN = "seen-by-all-ranks"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
ENTRANCES = (INDEX, ONE)
"""Files without which a folder holds no model: when they are there, so are the files that they name."""

OPTIONS = {"is_main_process", "max_shard_size", "save_original_format"}
"""Options of `save_pretrained`; others are for transformers itself, with all weights at rank 0."""


def save_folder(
    model: Any,
    plain: Any,
    engine: Engine,
    folder: Path,
    *,
    is_main_process: bool = True,
    max_shard_size: int | str = "50GB",
    save_original_format: bool = True,
) -> None:
    """Write a model with its configuration, as `plain.save_pretrained` does; all ranks call it.

    Each rank writes what it holds. Where ranks do not see the same folder, rank 0 writes everything, and
    needs memory for the whole model. If a process ends meanwhile, the former files remain, in
    their place or in the hidden folder `FORMER`, from where the next save takes them back. Raises
    CheckpointError, on all ranks.
    """
    del is_main_process  # rank 0 is
    control, purpose, work = engine.stack.machinery.control, f"saving {folder}", folder / UNFINISHED
    options = {"max_shard_size": max_shard_size, "save_original_format": save_original_format}
    write = partial(plain.save_pretrained, model, work, **options)
    try:
        token = together(control, purpose, lambda: _begin(folder, lambda: write(state_dict={})), rank=0)
        writing, token = None, control.gather(token, purpose)[0]
        if not control.any(
            engine.layout.esp_size > 1 or not _is_known(), "looking how transformers writes a model"
        ):
            writing = _writing(model, engine, max_shard_size, original=save_original_format)
        alone = writing is None or not writing.fits or not _sees(work, token)
        if not control.any(alone, "looking whether all ranks can write the model") and writing is not None:
            writing.write(work)
        else:
            state = whole_state(model, engine)
            together(control, purpose, lambda: write(state_dict=state), rank=0)
        together(control, purpose, lambda: _finish(folder), rank=0)
    except BaseException:
        if control.rank == 0:
            shutil.rmtree(work, ignore_errors=True)
            with suppress(OSError):  # absent, or not empty: the next save takes back what it has
                (folder / FORMER).rmdir()
        raise


def _is_known() -> bool:
    """Return whether transformers and its hub have the functions for `_writing`, which are not public."""
    try:
        from huggingface_hub.serialization._base import parse_size_to_int
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError:
        return False
    return all(
        map(callable, (parse_size_to_int, revert_weight_conversion, remove_tied_weights_from_state_dict))
    )


def _sees(work: Path, token: str) -> bool:
    """Return whether this rank sees the folder of rank 0, and not one of that name from another save."""
    try:
        return (work / SEEN).read_text(encoding="utf-8") == token
    except OSError:
        return False


def _writing(model: Any, engine: Engine, max_shard_size: int | str, *, original: bool) -> Writing:
    from huggingface_hub.serialization._base import parse_size_to_int
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = without_marks(model.state_dict())
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    most_bytes = parse_size_to_int(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    convert = partial(revert_weight_conversion, model) if original else dict
    return Writing(model, engine, state, convert, most_bytes)


def _begin(folder: Path, write_papers: Callable[[], None]) -> str:
    """Write everything but the weights, and take back the files of a save that was interrupted.

    Returns the token by which other ranks recognise this folder.
    """
    work, former = folder / UNFINISHED, folder / FORMER
    work.parent.mkdir(parents=True, exist_ok=True)
    cut_off = not any((folder / name).exists() for name in ENTRANCES)
    if cut_off and former.is_dir() and not former.is_symlink():
        _move(former, folder)
    for left in (former, work):
        shutil.rmtree(left, ignore_errors=True)  # a file or a link stays, and is told below
    work.mkdir()
    with quiet():  # there are no weights to show
        write_papers()
    former.mkdir()  # made now, and not after everything has been written
    token = secrets.token_hex()
    write_whole(work / SEEN, token)
    return token


def _finish(folder: Path) -> None:
    """Put the complete new files in the place of the old ones."""
    work, former = folder / UNFINISHED, folder / FORMER
    (work / SEEN).unlink()
    files = list(work.iterdir())
    for each in (*files, work):
        make_durable(each)
    replaced = {path.name for path in files}
    try:
        _move(folder, former, lambda name: name in replaced or WEIGHTS.fullmatch(name) is not None)
        for each in (former, folder):
            make_durable(each)
        _move(work, folder)
    except BaseException:
        left = {path.name for path in work.iterdir()}
        _move(folder, work, lambda name: name in replaced - left)
        _move(former, folder)
        raise
    make_durable(folder)
    for done in (work, former):
        shutil.rmtree(done, ignore_errors=True)  # in place; the next save removes the rest


def _move(source: Path, target: Path, chosen: Callable[[str], bool] = lambda name: True) -> None:
    """Move files; those without which a folder holds no model leave first and arrive last."""
    files = [path for path in source.iterdir() if chosen(path.name)]
    out_of_use = target.name in (FORMER, UNFINISHED)
    for path in sorted(files, key=lambda path: (path.name in ENTRANCES) != out_of_use):
        path.rename(target / path.name)
