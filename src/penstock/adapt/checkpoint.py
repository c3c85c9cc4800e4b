"""Checkpoints of scheduled models: a folder that transformers reads, and the optimiser's state.

Everything has the name that it had before the model was spread, so a run may go on with another number of
ranks. The optimiser's state is in shards of all ranks; a tensor of it is named `optimizer.{parameter}.{key}`.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.adapt.engine import Engine
from penstock.adapt.export import expert_axes
from penstock.adapt.folder import UNFINISHED as UNFINISHED_MODEL
from penstock.adapt.scheduled import engine_of, is_wrapped_by_peft, saved_together
from penstock.checkpoint.folder import DamagedError
from penstock.checkpoint.storage import SUFFIX, Dealing, Part, Saving, State, Stored, misfits, together
from penstock.config import UNSET, ConfigError, read_json
from penstock.families.adapters import ExpertAxis, InTurn
from penstock.families.described import FORMER, FORMER_CHECKPOINT, refuse_cut_off
from penstock.families.experts import sharding_of_experts
from penstock.models.qwen3_moe import CONFIG
from penstock.runtime import ShardedAdamW
from penstock.runtime.expert_parallel.optimizer_state import watch_optimizer
from penstock.sharding import Sharding, sharding_of
from penstock.train.run_state import OPTIMIZER, Named, shares_of
from penstock.words import some_of
from penstock.writing import UNFINISHED, exchange, make_durable, remove_tree, write_whole

STATE, GROUPS = "optimizer", "optimizer.json"
OF_STATE = re.compile(rf"{STATE}(-\d+)+\.safetensors|optimizer\.json")
"""Names of the files of an optimiser's state."""

WITHOUT = "without_state"
"""Key in a group for the names of parameters that were never updated."""

ADAPTERS = "adapter_config.json"
OF_ADAPTERS = re.compile(
    rf"{OF_STATE.pattern}|adapter_model\.safetensors(\.index\.json)?|adapter_config\.json"
)
"""Names of the files of a checkpoint of adapters."""

OWN = re.compile(rf"{OF_ADAPTERS.pattern}|model.*\.safetensors(\.index\.json)?|(generation_)?config\.json")
"""Names of the files of any checkpoint."""

SHARED_SETTINGS = ("lr", "betas", "eps", "weight_decay")
"""Settings of a group that a ShardedAdamW has."""

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
    states.take(path, saved)


def _read_groups(file: Path) -> list[Group]:
    """Read the groups of an optimiser's parameters. Raises ConfigError about the file for anything else."""
    hint = "Copy it again, or go on from another checkpoint."
    saved = read_json(file, hint)
    if not isinstance(saved, list) or not all(map(_is_group, saved)):
        raise ConfigError(str(file), UNSET, "holds no groups of an optimizer's parameters", hint)
    return saved


def _is_group(group: object) -> bool:
    """Return whether this is a table that lists the names of parameters, and of those without state."""
    if not isinstance(group, dict):
        return False
    lists = (group.get("parameters"), group.get(WITHOUT))
    return all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in lists)


def refuse_adapters(folder: Path) -> None:
    """Raise ValueError for a folder with adapters and no model."""
    if (folder / ADAPTERS).is_file() and not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} holds adapters of peft, and not the model that they belong to: read them into it with "
            "PeftModel.from_pretrained(model, folder), and save what merge_and_unload() returns"
        )


@dataclass(frozen=True)
class _States:
    """An optimiser's state by the names of its parameters. axes: how experts lie in parameters of experts.

    All ranks construct it together: a sharded optimiser gathers parameters.
    """

    engine: Engine
    optimizer: torch.optim.Optimizer
    names: Mapping[nn.Parameter, str]
    axes: Mapping[str, ExpertAxis]
    shardings: Mapping[str, Sharding]

    @staticmethod
    def of(model: Any, engine: Engine, optimizer: torch.optim.Optimizer) -> _States:
        if isinstance(optimizer, ShardedAdamW):
            optimizer.flush()
            engine.stack.settle()
        names = {parameter: name for name, parameter in model.named_parameters()}
        strangers = sum(p not in names for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise ValueError(f"the optimizer has {strangers} parameters that are not the model's")
        shardings = {name: found for p, name in names.items() if (found := sharding_of(p)) is not None}
        return _States(engine, optimizer, names, expert_axes(model, engine), shardings)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimiser has, in its order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

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
        bare = {name for parameter, name in self.names.items() if not self._has_state(parameter)}
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
        for parameter in self.parameters:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                shape = torch.as_tensor(value).shape
                if shape not in ((), parameter.shape):
                    raise ValueError(
                        f"{type(self.optimizer).__name__} keeps {key} {list(shape)} of "
                        f"{self.names[parameter]} {list(parameter.shape)}: only state of a parameter's own "
                        "shape can be saved"
                    )

    def save(self, folder: Path) -> None:
        """Write the state, every rank its own; all ranks call this. Raises CheckpointError on all ranks."""
        control = self.engine.stack.machinery.control
        purpose = f"saving the optimizer's state in {folder}"
        together(control, purpose, lambda: _remove_state(folder), rank=0)
        digests = Saving(self._state(), folder, Dealing(control), control, purpose, lambda _: STATE).digests()

        def finish() -> None:
            if unseen := [name for name in digests if not (folder / name).exists()]:
                raise OSError(f"rank 0 does not see {unseen[0]}, which another rank has written")
            text = json.dumps(self.written, indent=1, default=_number)
            write_whole(folder / GROUPS, text, durable=True)

        together(control, purpose, finish, rank=0)

    def _has_state(self, parameter: nn.Parameter) -> bool:
        if isinstance(self.optimizer, ShardedAdamW):
            return self.optimizer.updates.share_of(parameter) is not None
        return bool(self.optimizer.state.get(parameter))

    def _state(self) -> State:
        """Return views of what this rank has of the state."""
        state: State = {}
        if isinstance(self.optimizer, ShardedAdamW):
            for parameter, name in self.names.items():
                state |= shares_of(self.optimizer, name, parameter, self)
            return state
        for parameter in self.parameters:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state |= self._part(parameter, key, torch.as_tensor(value))
        return state

    def split(self, name: str, tensor: Tensor, suffix: str = "") -> list[Named]:
        """Return a tensor of a parameter's shape; experts that lie in turn get their own axis."""
        axis, layout = self.axes.get(name), self.engine.layout
        if axis is None:
            return [(f"{name}{suffix}", tensor, self.shardings.get(name))]
        sharding = sharding_of_experts(tensor.shape, self.shardings.get(name), layout)
        if isinstance(axis, InTurn):
            tensor = tensor.unflatten(1, (axis.rank, -1))
            shape = (*tensor.shape[:2], tensor.shape[2] * layout.ep_size)
            sharding = Sharding.along(2, shape, (), layout.ep_rank, layout.ep_size)
        return [(f"{name}{suffix}", tensor, sharding)]

    def _part(self, parameter: nn.Parameter, key: str, tensor: Tensor) -> State:
        """Return this rank's part of a tensor of the state, by its name."""
        name = self.names[parameter]
        if not tensor.dim():
            return {f"{OPTIMIZER}{name}.{key}": Part.of(tensor)}
        named = self.split(name, tensor, f".{key}")
        return {f"{OPTIMIZER}{each}": Part.of(part, sharding) for each, part, sharding in named}

    def take(self, folder: Path, saved: list[Group]) -> None:
        """Fill the optimiser's state from a folder, and its groups' settings from `saved`."""
        parameters = self.parameters
        numbers = {self.names[parameter]: number for number, parameter in enumerate(parameters)}
        states: dict[int, dict[str, Tensor]] = {}
        sharded = isinstance(self.optimizer, ShardedAdamW)
        state = self._state() if sharded else {}
        try:
            stored = Stored(folder, [path.name for path in folder.glob(f"*{SUFFIX}")], prefix=OPTIMIZER)
            places = {name: name.removeprefix(OPTIMIZER).rpartition(".") for name in stored.whole}
            _check_complete(folder, {name for name, _, _ in places.values()}, saved)
            for logical, (shape, dtype) in () if sharded else stored.whole.items():
                name, _, key = places[logical]
                parameter = parameters[numbers[name]]
                tensor = torch.empty(parameter.shape if shape else (), dtype=dtype)
                states.setdefault(numbers[name], {})[key] = tensor
                state |= self._part(parameter, key, tensor)
            if (found := misfits(state, stored.whole, state)) is not None:
                raise DamagedError(found)
            stored.load(state)
        except DamagedError as error:
            raise ValueError(
                f"{folder} has no state of this optimizer: {error}. Copy it again, or go on from another "
                "checkpoint"
            ) from error
        self._take_settings(states, saved)

    def _take_settings(self, states: dict[int, dict[str, Tensor]], saved: list[Group]) -> None:
        """Give the optimiser its states, by the numbers of parameters, and its groups' settings."""
        if isinstance(self.optimizer, ShardedAdamW):  # its states are filled already
            for mine, group in zip(self.optimizer.param_groups, saved, strict=True):
                mine.update({key: group[key] for key in SHARED_SETTINGS if key in group})
            return
        groups, first = [], 0
        for group in saved:
            settings = {key: value for key, value in group.items() if key not in ("parameters", WITHOUT)}
            last = first + len(group["parameters"])
            groups.append({**settings, "params": list(range(first, last))})
            first = last
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})


def _remove_state(folder: Path) -> None:
    """Remove what is left of an optimiser's state; first the file without which there is none."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != GROUPS):
        if OF_STATE.fullmatch(path.name):
            remove_tree(path)
    make_durable(folder)


def _check_names(path: Path, here: Sequence[Group], saved: Sequence[Group]) -> None:
    """Raise ValueError unless both optimisers have the same parameters in the same groups."""
    mine, theirs = ([group["parameters"] for group in groups] for groups in (here, saved))
    if mine != theirs:
        differing = sorted(set(chain(*mine)) ^ set(chain(*theirs)))[:3]
        names = ", ".join(differing) or "the same ones, in other groups or another order"
        raise ValueError(f"{path} has the state of an optimizer of other parameters: {names}")


def _check_complete(folder: Path, found: Set[str], saved: Sequence[Group]) -> None:
    """Raise ValueError unless a folder has the state of the parameters that the groups name, and no other."""
    names, bare = (set(chain(*(group[key] for group in saved))) for key in ("parameters", WITHOUT))
    missing, unexpected = sorted(names - bare - found), sorted(found - names)
    if missing or unexpected:
        raise ValueError(
            f"{folder} is not what {GROUPS} says: missing {some_of(missing)}, unexpected "
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
