"""Checkpoints of scheduled models: a folder that transformers reads, and the optimiser's state.

Everything is saved whole and under the names that the model had before it was spread, so a run may go on with
another number of ranks.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.adapt.adapters import ALONG_ROWS, ExpertAxis
from penstock.adapt.described import CONFIG, FORMER, FORMER_CHECKPOINT, refuse_cut_off
from penstock.adapt.engine import Engine
from penstock.adapt.export import expert_axes
from penstock.adapt.folder import UNFINISHED as UNFINISHED_MODEL
from penstock.adapt.scheduled import engine_of, is_wrapped_by_peft, refuse_sharing, saved_together
from penstock.adapt.weights import StoredTensor, some_of
from penstock.config import UNSET, ConfigError, read_json
from penstock.mesh import Group as Ranks
from penstock.runtime import ShardedAdamW
from penstock.runtime.expert_parallel.optimizer_state import watch_optimizer
from penstock.train.checkpoint import together
from penstock.train.storage.shards import Outgoing, write_shard
from penstock.train.storage.stored import Entry, writing_order
from penstock.writing import UNFINISHED, exchange, make_durable, new_folder, remove_tree, write_whole

STATE, GROUPS = "optimizer.safetensors", "optimizer.json"
WITHOUT = "without_state"
"""Key in a group for the names of parameters that were never updated."""

ADAPTERS = "adapter_config.json"
OF_ADAPTERS = re.compile(
    r"(adapter_model|optimizer)\.safetensors(\.index\.json)?|(optimizer|adapter_config)\.json"
)
"""Names of the files of a checkpoint of adapters."""

OWN = re.compile(rf"{OF_ADAPTERS.pattern}|model.*\.safetensors(\.index\.json)?|(generation_)?config\.json")
"""Names of the files of any checkpoint."""

Group = dict[str, Any]
"""Settings of a group of parameters, and the parameters' names as `parameters`."""


def save_checkpoint(model: Any, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Save a scheduled model and its optimiser's state; all ranks call it together.

    The folder appears when it is complete. It replaces a folder of that name, from which all files stay that
    belong to no model or optimiser (a tokenizer, say). Of a model of peft only the adapters are saved. Raises
    ValueError for an optimiser of other parameters, or of a kind whose state does not belong to single
    parameters, and CheckpointError, on all ranks, where the folder cannot be written: an older one then
    stays.
    """
    path, control = Path(folder).resolve(), engine_of(model).stack.machinery.control
    states = _States.of(model, engine_of(model), optimizer)
    states.check()
    work = path.with_name(f"{UNFINISHED}{path.name}")
    together(control, f"saving {path}", lambda: _begin(work, path), rank=0)
    try:
        (saved_together(model) if is_wrapped_by_peft(model) else model).save_pretrained(work)
        states.save(work)
        together(control, f"saving {path}", lambda: _finish(work, path), rank=0)
    except Exception:
        if control.rank == 0:
            with suppress(OSError):  # the error of saving matters more
                _take_back(work, path)
        raise


def save_optimizer(model: Any, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Save the state of a scheduled model's optimiser in an existing folder; all ranks call it together.

    Raises the errors of `save_checkpoint`.
    """
    states = _States.of(model, engine_of(model), optimizer)
    states.check()
    states.save(Path(folder))


def load_optimizer(model: Any, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Give an optimiser the state that `save_checkpoint` has saved; for experts, this rank's share.

    model: scheduled, with the parameters that the optimiser has, in the same groups. Raises ValueError if the
    state of another optimiser was saved, or none.
    """
    path = Path(folder)
    if not (path / GROUPS).is_file():
        refuse_cut_off(path)
        raise ValueError(f"{path} holds no {GROUPS}: save_checkpoint has not written it")
    states = _States.of(model, engine_of(model), optimizer)
    saved = _read_groups(path / GROUPS)
    _check_names(path, states.groups, saved)
    states.take(path / STATE, saved)


def _read_groups(file: Path) -> list[Group]:
    """Read the groups of an optimiser's parameters. Raises ConfigError about the file for anything else."""
    hint = "Copy it again, or go on from another checkpoint."
    saved = read_json(file, hint)
    if not isinstance(saved, list) or not all(map(_is_group, saved)):
        raise ConfigError(str(file), UNSET, "holds no groups of an optimizer's parameters", hint)
    return saved


def _is_group(group: object) -> bool:
    """Return whether this is a table that lists the names of parameters."""
    if not isinstance(group, dict):
        return False
    lists = (group.get("parameters"), group.get(WITHOUT, []))
    return all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in lists)


def is_trained(folder: Path) -> bool:
    """Return whether a folder is a checkpoint with the state of an optimiser, by `save_checkpoint`."""
    return (folder / GROUPS).is_file()


def export(folder: Path, target: Path) -> None:
    """Copy a checkpoint without the optimiser's state; `target` appears when it is complete."""
    with new_folder(target) as work:
        shutil.copytree(folder, work, ignore=_left_out)


def _left_out(folder: str, names: Sequence[str]) -> set[str]:
    """Return the names that no copy of a checkpoint has. Raises ValueError for links, which lead anywhere."""
    found = {name for name in names if name in (STATE, GROUPS) or name.startswith(".")}
    for name in set(names) - found:
        if Path(folder, name).is_symlink():
            raise ValueError(f"{Path(folder, name)} is a link: put a copy of what it leads to into its place")
    return found


def refuse_adapters(folder: Path) -> None:
    """Raise ValueError for a folder with adapters and no model."""
    if (folder / ADAPTERS).is_file() and not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} holds adapters of peft, and not the model that they belong to: read them into it with "
            "PeftModel.from_pretrained(model, folder), and save what merge_and_unload() returns"
        )


@dataclass(frozen=True)
class _States:
    """An optimiser's state by the names of its parameters. axes: how experts lie in parameters of experts."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    names: Mapping[Tensor, str]
    axes: Mapping[str, ExpertAxis]

    @staticmethod
    def of(model: Any, engine: Engine, optimizer: torch.optim.Optimizer) -> _States:
        refuse_sharing(engine, "the checkpoint of an optimizer's state")
        if isinstance(optimizer, ShardedAdamW):
            raise ValueError(
                "the state of a ShardedAdamW is in shares: save optimizer.state_dict() by itself"
            )
        names = {parameter: name for name, parameter in model.named_parameters()}
        strangers = sum(p not in names for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise ValueError(f"the optimizer has {strangers} parameters that are not the model's")
        return _States(engine, optimizer, names, expert_axes(model, engine))

    @property
    def groups(self) -> list[Group]:
        """Settings of the groups of parameters, and the names of these parameters."""
        return [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "parameters": [self.names[parameter] for parameter in group["params"]],
            }
            for group in self.optimizer.param_groups
        ]

    @property
    def written(self) -> list[Group]:
        """The groups as they are written, with the names of parameters that have no state."""
        bare = {name for parameter, name in self.names.items() if not self.optimizer.state.get(parameter)}
        return [
            {**group, WITHOUT: [name for name in group["parameters"] if name in bare]}
            for group in self.groups
        ]

    def check(self) -> None:
        """Raise ValueError for state or settings that cannot be saved, ShareError for another rank's state.

        State must belong to single numbers of parameters; settings must be numbers that JSON can hold.
        """
        watch_optimizer(self.optimizer)
        json.dumps(self.groups, default=_number)
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                shape = torch.as_tensor(value).shape
                if shape not in ((), parameter.shape):
                    raise ValueError(
                        f"{type(self.optimizer).__name__} keeps {key} {list(shape)} of "
                        f"{self.names[parameter]} {list(parameter.shape)}: only state of a parameter's own "
                        "shape can be saved"
                    )

    def save(self, folder: Path) -> None:
        """Write the state on rank 0; all ranks call this. Raises CheckpointError on all ranks."""
        outgoing = sorted(self._all(), key=lambda each: writing_order(each.name, each.entry.dtype))
        control = self.engine.stack.machinery.control
        together(control, f"saving {folder / STATE}", lambda: self._write(folder, outgoing))

    def _write(self, folder: Path, outgoing: Sequence[Outgoing]) -> None:
        """Write the state on rank 0, which takes what the other ranks send even where writing fails."""
        left = iter(outgoing)
        try:
            if self.engine.layout.rank == 0:
                write_shard(
                    folder / STATE, [replace(each, load=lambda: next(left).load()) for each in outgoing]
                )
                text = json.dumps(self.written, indent=1, default=_number)
                write_whole(folder / GROUPS, text, durable=True)
        finally:
            for each in left:
                each.load()

    def _all(self) -> list[Outgoing]:
        """Return every tensor of the state, whole."""
        return [
            self._outgoing(f"{self.names[parameter]}:{key}", self.names[parameter], torch.as_tensor(value))
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        ]

    def _outgoing(self, logical: str, name: str, tensor: Tensor) -> Outgoing:
        axis, shape = self.axes.get(name), tuple(tensor.shape)
        if axis is None or not shape or self.engine.layout.ep_size == 1:
            return Outgoing(name=logical, entry=Entry(shape=shape, dtype=tensor.dtype), load=lambda: tensor)
        shape = axis.whole_shape(shape, self.engine.layout.ep_size)
        return Outgoing(
            name=logical,
            entry=Entry(shape=shape, dtype=tensor.dtype),
            load=lambda: self._joined(tensor, logical, axis),
        )

    def _joined(self, tensor: Tensor, logical: str, axis: ExpertAxis) -> Tensor:
        """Return the joined parts of all ranks on rank 0; on other ranks the value has no meaning."""
        layout, control = self.engine.layout, self.engine.stack.machinery.control
        members = layout.mesh.members(0, Ranks.EXPERT)
        if layout.rank not in members:
            return tensor
        parts = control.collect(tensor.detach().cpu(), members, 0, f"saving {logical}")
        return axis.join(parts) if parts else tensor

    def take(self, file: Path, saved: list[Group]) -> None:
        """Fill the optimiser's state from a file, and its groups' settings from `saved`."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        numbers = {self.names[parameter]: number for number, parameter in enumerate(parameters)}
        states: dict[int, dict[str, Tensor]] = {}
        try:
            with safe_open(file, framework="pt") as opened:
                shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{file} cannot be read as safetensors: {error}. Copy it again, or go on from "
                "another checkpoint"
            ) from error
        _check_complete(file, {logical.rpartition(":")[0] for logical in shapes}, saved)
        for logical, shape in shapes.items():
            name, _, key = logical.rpartition(":")
            stored = StoredTensor(file, logical)
            states.setdefault(numbers[name], {})[key] = self._own(stored, parameters[numbers[name]], shape)
        groups, first = [], 0
        for group in saved:
            settings = {key: value for key, value in group.items() if key not in ("parameters", WITHOUT)}
            last = first + len(group["parameters"])
            groups.append({**settings, "params": list(range(first, last))})
            first = last
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def _own(self, stored: StoredTensor, parameter: Tensor, shape: Sequence[int]) -> Tensor:
        """Read this rank's part of a stored tensor."""
        axis, layout = self.axes.get(self.names[parameter]), self.engine.layout
        if axis is None or not shape:
            return stored[...]
        if axis != ALONG_ROWS:
            return axis.part(stored[...], layout.ep_rank, layout.ep_size).clone()
        first = layout.ep_rank * len(parameter)
        return replace(stored, rows=slice(first, first + len(parameter)))[...]


def _check_names(path: Path, here: Sequence[Group], saved: Sequence[Group]) -> None:
    """Raise ValueError unless both optimisers have the same parameters in the same groups."""
    mine, theirs = ([group["parameters"] for group in groups] for groups in (here, saved))
    if mine != theirs:
        differing = sorted(set(chain(*mine)) ^ set(chain(*theirs)))[:3]
        names = ", ".join(differing) or "the same ones, in other groups or another order"
        raise ValueError(f"{path} has the state of an optimizer of other parameters: {names}")


def _check_complete(file: Path, found: Set[str], saved: Sequence[Group]) -> None:
    """Raise ValueError unless a file has the state of the parameters that the groups name, and of no others.

    Files of earlier versions do not name the parameters without state.
    """
    names = set(chain(*(group["parameters"] for group in saved)))
    bare = set(chain(*(group[WITHOUT if WITHOUT in group else "parameters"] for group in saved)))
    missing, unexpected = sorted(names - bare - found), sorted(found - names)
    if missing or unexpected:
        raise ValueError(
            f"{file} is not what {GROUPS} says: missing {some_of(missing)}, unexpected "
            f"{some_of(unexpected)}. Copy both again, or go on from another checkpoint"
        )


def _number(setting: object) -> object:
    """Return a group's setting as JSON can hold it: a learning rate may be a tensor."""
    if isinstance(setting, Tensor):
        return setting.item()
    raise ValueError(f"an optimizer's setting {setting!r} cannot be saved: use a number")


def _begin(work: Path, path: Path) -> None:
    """Put in order what a save that was killed has left: a checkpoint without its name, and other files."""
    former = _former(path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if former.is_dir() and not former.is_symlink():
        if path.exists():
            for each in _others(former, path):
                each.rename(path / each.name)
        else:
            former.rename(path)
    for left in (former, work):
        remove_tree(left)


def _finish(work: Path, path: Path) -> None:
    """Give a complete checkpoint its final name, in place of an older one, whose other files stay there.

    At every moment there is one of the two; where the system cannot exchange names, both are without theirs
    for a moment, and `refuse_cut_off` says where the older one is.
    """
    former = _former(path)
    for each in (*work.iterdir(), work):
        make_durable(each)
    if path.exists():
        with suppress(OSError):  # folders, and file systems without links: these files follow below
            for each in _others(path, work):
                (work / each.name).hardlink_to(each)
        work.rename(former)
        if not exchange(former, path):
            former.rename(work)
            path.rename(former)
            work.rename(path)
        for each in _others(former, path):
            each.rename(path / each.name)
    else:
        work.rename(path)
    make_durable(path.parent)
    with suppress(OSError):  # the new one is in place; the next save removes the rest
        remove_tree(former)


def _take_back(work: Path, path: Path) -> None:
    """Remove everything of a checkpoint that was not completed: it may be what fills the disk."""
    former = _former(path)
    if former.is_dir() and not path.exists():
        former.rename(path)
    remove_tree(work)


def _former(path: Path) -> Path:
    """Return the path of an older checkpoint until the new one has its name."""
    return path.with_name(f"{FORMER_CHECKPOINT}{path.name}")


def _others(older: Path, newer: Path) -> list[Path]:
    """Return the files of the older folder that belong to no checkpoint and are not in the newer one.

    Beside adapters these include a whole model: adapters are saved without it, and possibly where it lies.
    """
    own = OF_ADAPTERS if (newer / ADAPTERS).is_file() else OWN
    left = (UNFINISHED_MODEL, FORMER)  # by a save that ended early
    names = [each.name for each in older.iterdir() if each.name not in left and not own.fullmatch(each.name)]
    return [older / name for name in names if not (newer / name).exists()]
