"""Models of transformers, written by all ranks together: each writes views of what it holds.

What ranks hold in parts and a file stores whole (shared attention, and the experts of some families) becomes
whole on one of these ranks, which take turns. `ModelNaming` says how checkpoints name what a rank has. Old
files of a folder stay until all new ones are on disk.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import secrets
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.adapt.decoder import Decoder
from penstock.adapt.engine import Engine
from penstock.checkpoint.folder import INDEX, ONE, write_index
from penstock.checkpoint.storage import (
    CODES,
    MODEL,
    Files,
    Outgoing,
    Part,
    Saving,
    State,
    make_whole,
    together,
)
from penstock.families.adapters import ExpertAxis, axes_of
from penstock.families.described import FORMER, FORMER_CHECKPOINT, FORMER_STATE, quiet
from penstock.families.experts import sharding_of_experts
from penstock.families.weights import EXPERT, Place, places_of, saved_tensors
from penstock.mesh import Group
from penstock.partial_state import ShareError, check_marks, local_state, taken_state, without_marks
from penstock.sharding import Named, Sharding, joined, shardings_of
from penstock.topology import Control, Layout
from penstock.words import some_of
from penstock.writing import UNFINISHED, exchange, make_durable, remove_tree, write_whole


class ModelNaming:
    """The names of tensors of a model of transformers.

    Files have those of transformers; the optimiser's state those of the model, whose experts are stacked.

    Args:
        decoder: The pieces of `model`.
        original: Whether files have the names of published models, see `places_of`.
    """

    def __init__(self, layout: Layout, decoder: Decoder, model: nn.Module, *, original: bool = True) -> None:
        self._layout, self._model, self._original = layout, model, original
        self._shardings, self._axes = shardings_of(model), expert_axes(model, decoder)
        placement = decoder.cut_layers[0].experts.placement
        self._first = placement.held(layout.ep_rank)[0]
        self._places: Mapping[str, tuple[Place, Sharding | None]] | None = None

    def in_files(self) -> Iterator[Named]:
        """Yield views of the model's tensors, as files of transformers have them."""
        tensors = {name: each.detach() for name, each in saved_tensors(self._model)}
        if self._places is None:  # worked out once for a save, which asks several times
            self._places = self._found(tensors)
        for name, (place, each) in self._places.items():
            view = place.view(tensors[place.source])
            if place.source not in self._axes or _is_of_one(name):
                yield name, view, each
            else:
                yield name, *self.part_of(place.source, view, each)

    def _found(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Place, Sharding | None]]:
        """Return where tensors of files lie, with what part this rank has; of experts, of one expert."""
        here = whole = self._places_of(tensors)
        if cut := self._axes.keys() & self._shardings.keys():
            shapes = {name: (len(tensors[name]), *self._shardings[name].shape) for name in cut}
            widened = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
            whole = self._places_of({**tensors, **widened})
        places: dict[str, tuple[Place, Sharding | None]] = {}
        for name, place in here.items():
            sharding = self._shardings.get(place.source)
            if sharding is not None and place.source in cut:
                shape, of_all = (at.shape[0 if _is_of_one(name) else 1 :] for at in (place, whole[name]))
                if (shape, of_all) != (sharding.part_shape, sharding.shape):
                    sizes = enumerate(zip(shape, of_all, strict=True))
                    (dim,) = (dim for dim, (part, all_) in sizes if part < all_)
                    sharding = Sharding.along(dim, of_all, sharding.axes, sharding.index, sharding.count)
            places[name] = place, sharding
        return places

    def _places_of(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Place]:
        return places_of(self._model, tensors, self._axes.keys(), self._first, original=self._original)

    def split(self, name: str, tensor: Tensor, suffix: str = "") -> Iterable[Named]:
        """Return a tensor of a parameter's shape, by the parameter's name."""
        return [(f"{name}{suffix}", *self.part_of(name, tensor))]

    def part_of(
        self, name: str, tensor: Tensor, each: Sharding | None = None
    ) -> tuple[Tensor, Sharding | None]:
        """Return a tensor of a parameter's shape, and what part of the whole that is.

        Experts that lie in turn get their own axis, on one rank, too.

        Args:
            name: The parameter's name.
            each: The part of a tensor of one expert, where that is not the parameter's.

        Returns:
            The tensor, and its part of the whole; None if it is whole.
        """
        axis, layout, each = self._axes.get(name), self._layout, each or self._shardings.get(name)
        if axis is None:
            return tensor, each
        if axis.dim == 0:
            return tensor, sharding_of_experts(tensor.shape, each, layout)
        tensor = tensor.unflatten(1, (axis.rank, -1))
        if layout.ep_size == 1:
            return tensor, None
        whole = (*tensor.shape[:2], tensor.shape[2] * layout.ep_size)
        return tensor, Sharding.along(2, whole, Group.EXPERT, layout.ep_rank, layout.ep_size)


def _is_of_one(name: str) -> bool:
    """Return whether a tensor of a file is of one expert, by its name."""
    return EXPERT.search(name) is not None


def expert_axes(model: nn.Module, decoder: Decoder) -> dict[str, ExpertAxis]:
    """Return how experts lie in all parameters of experts, adapters too, by name."""
    cuts = [part.cut for part in decoder.cut_layers]
    for cut in cuts:
        cut.follow()  # adapters may have been put on since the last pass
    axes = {p: axis for cut in cuts for p, axis in axes_of(cut.experts).items()}
    return {name: axes[p] for name, p in model.named_parameters(remove_duplicate=False) if p in axes}


OPTIONS = {"is_main_process", "max_shard_size", "save_original_format"}
"""Options of `save_pretrained`; others are for transformers itself, with all weights at rank 0."""

MOST_SHARD = "50GB"
"""Largest size of a file, where nothing else is said, as transformers has it."""


def save_model(
    model: Any, plain: Any, engine: Engine, folder: Path, given: Mapping[str, Tensor] | None, **options: Any
) -> None:
    """Write a model with its configuration, as `plain.save_pretrained` does; all ranks call it.

    With a state that is `given`, with adapters that transformers itself has put into the model, and with
    other `options` than `OPTIONS`, transformers writes on rank 0.

    Args:
        plain: The class that the model had before it was scheduled.
        given: A state dictionary that is saved instead of the model's own; None = the model's.
        options: Further arguments of `save_pretrained`.
    """
    control, purpose = engine.stack.machinery.control, f"saving {folder}"
    check_names(model, plain, control, given)
    engine.warn_if_different()
    unusual = given is not None or _has_own_adapters(model) or not options.keys() <= OPTIONS
    if control.any(unusual, "comparing how a model is to be saved"):
        _write_at_rank_0(model, plain, engine, folder, given, **options)
        return
    state_in = partial(model_state, model, plain, engine, purpose=purpose, **options)
    divide = partial(numbered, most=options.get("max_shard_size", MOST_SHARD))
    files = InPlace(folder, close_model)
    Saving(files, control, purpose, state_in, divide=divide, copies=False).finish()


def model_state(
    model: Any,
    plain: Any,
    engine: Engine,
    work: Path,
    purpose: str,
    *,
    is_main_process: bool = True,
    max_shard_size: int | str = MOST_SHARD,
    save_original_format: bool = True,
) -> State:
    """Write all of a model but its weights into a folder, on rank 0; return what this rank has of these.

    Where ranks do not see that folder, or transformers writes other tensors than views of parameters, rank 0
    writes everything, for which it needs memory, and nothing is left to be written. All ranks call it.

    Args:
        plain: The class that the model had before it was scheduled.
        work: The folder.
        purpose: What the message of a failure says was done.
        is_main_process: Is accepted, as transformers does it, and ignored.
        max_shard_size: Largest size of a file, in bytes or in words.
        save_original_format: Whether files have the names of published models.
    """
    del is_main_process  # rank 0 is
    options = {"max_shard_size": max_shard_size, "save_original_format": save_original_format}
    layout, control = engine.layout, engine.stack.machinery.control
    naming = ModelNaming(layout, engine.decoder, model, original=save_original_format)
    named = None
    if not _has_own_adapters(model):
        named = _as_transformers_writes(model, naming, control, original=save_original_format)
    if named is not None:  # all ranks may write if this is one folder, by a file that only it can have
        mark = work / control.gather(secrets.token_hex(), purpose)[0]
        together(control, purpose, lambda: write_whole(mark, ""), rank=0)
        if control.any(not mark.exists(), purpose):
            named = None
        together(control, purpose, mark.unlink, rank=0)
    if named is None:
        _write_at_rank_0(model, plain, engine, work, None, **options)
        return {}
    with quiet():  # there are no weights to show
        papers = partial(plain.save_pretrained, model, work, state_dict={}, **options)
        together(control, purpose, papers, rank=0)
    state = {name: Part.of(part, sharding) for name, part, sharding in named}
    make_whole(state, named, layout.mesh, control, purpose)
    return state


def numbered(tensors: Sequence[Outgoing], control: Control, most: int | str = MOST_SHARD) -> Files:
    """Return the files of a rank for tensors of a model, named as transformers does. All ranks call it.

    Args:
        most: Largest size of a file, in bytes or in words ("50GB"); a larger tensor has a file of its own.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    described = {each.name: torch.empty_like(each.box, device="meta") for each in tensors}
    shards = split_torch_state_dict_into_shards(described, max_shard_size=most).filename_to_tensors.values()
    counts = control.gather(len(shards), "numbering the files of a model")
    count, before = sum(counts), sum(counts[: control.rank])
    sources = {each.name: each for each in tensors}
    return {
        ONE if count == 1 else f"{MODEL}-{number:05d}-of-{count:05d}.safetensors": [sources[n] for n in shard]
        for number, shard in enumerate(shards, before + 1)
    }


def close_model(work: Path) -> None:
    """Write the index of a model's files, of a single one, too.

    Without one vLLM and SGLang take all safetensors of a folder for weights, the optimiser's state as well.
    """
    if names := [path.name for path in work.glob(f"{MODEL}*.safetensors")]:
        write_index(work, names)


def _has_own_adapters(model: Any) -> bool:
    """Return whether transformers has put adapters into a model; they are saved without it."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _as_transformers_writes(
    model: Any, naming: ModelNaming, control: Control, *, original: bool
) -> list[Named] | None:
    """Return views for files; None unless those of all ranks are what transformers makes of the model."""
    try:  # neither is public
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError:
        return None
    state = local_state(model.state_dict())
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    whole = {name: _described(*naming.part_of(name, each)) for name, each in state.items()}
    wanted = remove_tied_weights_from_state_dict(whole, model)
    if original:
        with _seen_whole(model, whole):
            wanted = revert_weight_conversion(model, wanted)
    named = list(naming.in_files())
    own = _kinds({name: _described(part, sharding) for name, part, sharding in named})
    everyone = control.gather(own, "comparing what ranks write with what transformers would")
    written = {name: kind for kinds in everyone for name, kind in kinds.items()}
    return (
        named if written == _kinds(wanted) and all(dtype in CODES for _, dtype in written.values()) else None
    )


@contextmanager
def _seen_whole(model: Any, whole: Mapping[str, Tensor]) -> Iterator[None]:
    """Let transformers, inside this context, find these in place of a model's parameters.

    From their shapes it sees how weights lie, which those of parts do not tell.
    """
    model.get_parameter = whole.__getitem__
    try:
        yield
    finally:
        del model.get_parameter


def _described(part: Tensor, sharding: Any) -> Tensor:
    """Return, without values, the whole tensor of which ranks have such parts."""
    return torch.empty(part.shape if sharding is None else sharding.shape, dtype=part.dtype, device="meta")


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (each.shape, each.dtype) for name, each in tensors.items()}


def _write_at_rank_0(
    model: Any, plain: Any, engine: Engine, folder: Path, given: Mapping[str, Tensor] | None, **options: Any
) -> None:
    """Let transformers write a model, or a state dictionary `given`, on rank 0, with memory for all of it."""
    control, layout = engine.stack.machinery.control, engine.layout
    own = model.state_dict()  # all ranks join the state of adapters in it
    state = taken_state(model, own if given is None else given)
    naming = ModelNaming(layout, engine.decoder, model)
    names: dict[Any, list[str]] = {}  # layers may share a parameter, and are saved so
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state and state[name].shape == parameter.shape:  # adapters are whole
            names.setdefault(parameter, []).append(name)
    parts = [(each[0], *naming.part_of(each[0], state[each[0]].detach())) for each in names.values()]
    shared = [each for each in parts if each[2] is not None]
    whole = dict(joined(shared, layout.mesh, control, "saving a model", at=0))
    for each in names.values():
        state |= dict.fromkeys(each, whole[each[0]]) if each[0] in whole else {}

    def write() -> None:
        with _seen_whole(model, state):
            plain.save_pretrained(model, folder, state_dict=state, **options)

    together(control, f"saving {folder}", write, rank=0)


def check_names(model: Any, plain: Any, control: Control, given: Mapping[str, Tensor] | None = None) -> None:
    """Raise ValueError unless what is saved has the names that a model of this configuration has.

    All ranks call it together, and where one raises, all do. Adapters that transformers itself has put into a
    model are saved without it.

    Args:
        model: The model that is saved.
        plain: The class that it had before it was scheduled.
        given: The state dictionary that is saved, possibly on rank 0 alone; None = the model's own.

    Raises:
        ShareError: `given` has the experts of another rank.
        ValueError: Names are missing or unexpected.
    """
    own = model.state_dict()  # ranks join adapters in it, even where one of them is given a state
    saved = own if given is None else given

    def check() -> None:
        if not _has_own_adapters(model):
            _check_names(model, plain, own, saved)

    control.agreed(check, "comparing names of what is saved", raises=(ValueError, ShareError))


def _check_names(model: Any, plain: Any, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    check_marks(saved, own)
    taken_state(model, saved)
    try:
        with quiet(), torch.device("meta"):
            wanted = plain(copy.deepcopy(model.config)).state_dict().keys()
    except Exception as error:  # a class from elsewhere may raise anything
        warnings.warn(
            f"names of what is saved were not compared: no {plain.__name__} can be built from its "
            f"configuration alone ({type(error).__name__}: {error})",
            stacklevel=5,
        )
        return
    names = without_marks(saved).keys()
    missing, unexpected = sorted(wanted - names), sorted(names - wanted)
    if missing or unexpected:
        raise ValueError(
            f"this is no {plain.__name__} of its configuration any more, and transformers would not read "
            f"what is saved: missing {some_of(missing)}; unexpected "
            f"{some_of(unexpected)}. Adapters of peft: merge them first (merge_and_unload), or "
            "save them alone (save_pretrained of the PeftModel)"
        )


UNFINISHED_MODEL, UNFINISHED_STATE = ".unfinished-model", ".unfinished-optimizer"
"""Subfolders for files that are being written."""

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class InPlace:
    """Files that are moved into a folder, those of a model for example. Others in there stay, as does the
    folder itself.

    If a process ends meanwhile, the former files are in their place or in the hidden folder `kept`, from
    where the next save of the same files takes them back.

    Attributes:
        path: The folder.
        close: Writes into a folder what names the files of ranks.
        own: The names of former files that go.
        entrances: Files without one of which there is nothing; they leave last to first, before all others,
            and arrive first to last, after them.
        unfinished, kept: Names of the hidden folders for new files and former ones, others for every kind.
    """

    path: Path
    close: Callable[[Path], None]
    own: re.Pattern[str] = WEIGHTS
    entrances: Sequence[str] = (INDEX, ONE)
    unfinished: str = UNFINISHED_MODEL
    kept: str = FORMER

    @property
    def work(self) -> Path:
        return self.path / self.unfinished

    @property
    def former(self) -> Path:
        return self.path / self.kept

    def begin(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.give_up()
        for folder in (self.work, self.former):  # the latter, too, before everything has been written
            folder.mkdir()

    def finish(self, digests: Mapping[str, str]) -> None:
        del digests
        self.close(self.work)
        files = list(self.work.iterdir())
        for entry in (*files, self.work):
            make_durable(entry)
        new = {path.name for path in files}
        self._move(self.path, self.former, lambda name: name in new or bool(self.own.fullmatch(name)))
        for entry in (self.former, self.path):
            make_durable(entry)
        self._move(self.work, self.path)
        make_durable(self.path)
        with suppress(OSError):  # all is in place; the next save removes the rest
            self.give_up()

    def give_up(self) -> None:
        waiting, there = (
            any((each / name).exists() for name in self.entrances) for each in (self.work, self.path)
        )
        if (waiting or not there) and self.former.is_dir() and not self.former.is_symlink():
            self._move(self.former, self.path)
        for left in (self.work, self.former):
            remove_tree(left)

    def _move(self, source: Path, target: Path, chosen: Callable[[str], bool] = lambda name: True) -> None:
        """Move files, in the order in which entrances leave or arrive."""
        places = {name: place for place, name in enumerate(self.entrances, 1)}
        files = [path for path in source.iterdir() if chosen(path.name)]
        files.sort(key=lambda path: places.get(path.name, 0), reverse=target != self.path)
        for path in files:
            path.rename(target / path.name)


@dataclass(frozen=True)
class AsWhole:
    """A folder that takes the place of another one of its name, of which files stay that are not its `own`.

    At every moment there is one of the two folders; where the system cannot exchange names, both are without
    theirs for a moment, and `refuse_cut_off` says where the older one is.

    Attributes:
        path: The place of the folder.
        close: See `InPlace`.
        own: Tells by the name of an older folder's file and those in the new one whether the former goes.
    """

    path: Path
    close: Callable[[Path], None]
    own: Callable[[str, Collection[str]], bool]

    @property
    def work(self) -> Path:
        return self.path.with_name(f"{UNFINISHED}{self.path.name}")

    @property
    def former(self) -> Path:
        """The place of the older folder until the new one has its name."""
        return self.path.with_name(f"{FORMER_CHECKPOINT}{self.path.name}")

    def begin(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
        here: Path | None = None
        with suppress(FileNotFoundError):  # the working directory is gone already
            here = Path.cwd()
        if here is not None and here.is_relative_to(self.path):
            why = "the current working directory, which would be lost; name a folder in it"
            raise OSError(errno.EBUSY, why, str(self.path))
        self.give_up()
        self.work.mkdir(parents=True)

    def finish(self, digests: Mapping[str, str]) -> None:
        del digests
        self.close(self.work)
        for path in (*self.work.iterdir(), self.work):
            make_durable(path)
        if self.path.exists():
            with suppress(OSError):  # folders, and file systems without links: these files follow below
                for path in self._others(self.path, self.work):
                    (self.work / path.name).hardlink_to(path)
            self.work.rename(self.former)
            if not exchange(self.former, self.path):
                self.former.rename(self.work)
                self.path.rename(self.former)
                self.work.rename(self.path)
            self._take_others()
        else:
            self.work.rename(self.path)
        make_durable(self.path.parent)
        with suppress(OSError):  # the new one is in place; the next save removes the rest
            remove_tree(self.former)

    def give_up(self) -> None:
        if self.former.is_dir() and not self.former.is_symlink():
            if self.path.exists():
                self._take_others()
            else:
                self.former.rename(self.path)
        for left in (self.former, self.work):
            remove_tree(left)

    def _take_others(self) -> None:
        for path in self._others(self.former, self.path):
            path.rename(self.path / path.name)

    def _others(self, older: Path, newer: Path) -> list[Path]:
        """Return the files of the older folder that belong to no checkpoint and are not in the newer one."""
        new = {each.name for each in newer.iterdir()}
        left = (UNFINISHED_MODEL, UNFINISHED_STATE, FORMER, FORMER_STATE)  # by a save that ended early
        names = [each.name for each in older.iterdir() if each.name not in new and each.name not in left]
        return [older / name for name in names if not self.own(name, new)]
