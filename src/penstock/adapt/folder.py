"""A folder of transformers that is written as a whole: what was there stays until all of it is on disk."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from penstock.adapt.described import quiet
from penstock.adapt.engine import Engine
from penstock.adapt.export import whole_state
from penstock.adapt.saving import Writing
from penstock.adapt.weights import INDEX, ONE
from penstock.train.checkpoint import together
from penstock.train.storage.files import make_durable

UNFINISHED, FORMER = ".unfinished-model", ".former-model"
"""In the folder: what is being written, and what was there, until the new files are in its place."""

SEEN = "seen-by-all-ranks"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
ENTRANCES = (INDEX, ONE)
"""Without these a folder holds no model: what they name is there when they are."""

OPTIONS = {"is_main_process", "max_shard_size", "save_original_format"}
"""Of `save_pretrained`: others are for transformers itself, with all weights at rank 0."""


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

    Each rank writes what it holds. Where ranks do not see the same folder, rank 0 writes all of it, and needs
    memory for the whole model. A process that ends meanwhile leaves what was there before, in its place or in
    the hidden folder `FORMER`, from where the next save takes it back. Raises CheckpointError, on all ranks.
    """
    del is_main_process  # rank 0 is
    control, purpose, work = engine.stack.machinery.control, f"saving {folder}", folder / UNFINISHED
    options = {"max_shard_size": max_shard_size, "save_original_format": save_original_format}
    write = partial(plain.save_pretrained, model, work, **options)
    try:
        token = together(control, purpose, lambda: _begin(folder, lambda: write(state_dict={})), rank=0)
        writing, token = None, control.gather(token, purpose)[0]
        if not control.any(not _is_known(), "looking how transformers writes a model"):
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
            with suppress(OSError):  # not there, or not empty: what it has is taken back by the next save
                (folder / FORMER).rmdir()
        raise


def _is_known() -> bool:
    """Whether transformers and its hub have what `_writing` needs, which are not for others to use."""
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
    """Whether this rank has the folder of rank 0, and not one of that name from another save."""
    try:
        return (work / SEEN).read_text(encoding="utf-8") == token
    except OSError:
        return False


def _writing(model: Any, engine: Engine, max_shard_size: int | str, *, original: bool) -> Writing:
    from huggingface_hub.serialization._base import parse_size_to_int
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    most_bytes = parse_size_to_int(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    convert = partial(revert_weight_conversion, model) if original else dict
    return Writing(model, engine, state, convert, most_bytes)


def _begin(folder: Path, write_papers: Callable[[], None]) -> str:
    """Write all but the weights; take back what a save has left that ended while files changed places.
    Returns by what other ranks know this very folder.
    """
    work, former = folder / UNFINISHED, folder / FORMER
    work.parent.mkdir(parents=True, exist_ok=True)
    if former.is_dir() and not any((folder / name).exists() for name in ENTRANCES):
        _move(former, folder)
    for left in (former, work):
        shutil.rmtree(left, ignore_errors=True)
    work.mkdir()
    with quiet():  # it has no weights to show
        write_papers()
    former.mkdir()  # now, and not when all has been written
    token = secrets.token_hex()
    (work / SEEN).write_text(token, encoding="utf-8")
    return token


def _finish(folder: Path) -> None:
    """Put what is complete in the place of what was there."""
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
        shutil.rmtree(done, ignore_errors=True)  # the model is in its place, and the next save removes them


def _move(source: Path, target: Path, chosen: Callable[[str], bool] = lambda name: True) -> None:
    """What makes a folder hold a model leaves it first, and comes last."""
    files = [path for path in source.iterdir() if chosen(path.name)]
    out_of_use = target.name in (FORMER, UNFINISHED)
    for path in sorted(files, key=lambda path: (path.name in ENTRANCES) != out_of_use):
        path.rename(target / path.name)
