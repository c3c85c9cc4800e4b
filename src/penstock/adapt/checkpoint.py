"""Checkpoints of scheduled models: a folder that transformers reads, and the optimiser's state.

Everything has the name that it had before the model was spread, so a run may go on with another number of
ranks. The optimiser's state is in shards of all ranks; a tensor of it is named `optimizer.{parameter}.{key}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from penstock.adapt.engine import Engine
from penstock.adapt.saving import (
    UNFINISHED_STATE,
    AsWhole,
    InPlace,
    ModelNaming,
    check_names,
    close_model,
    model_state,
    numbered,
)
from penstock.adapt.scheduled import engine_of, is_wrapped_by_peft, plain_class, saved_together
from penstock.checkpoint.folder import DamagedError
from penstock.checkpoint.storage import (
    SUFFIX,
    Files,
    Outgoing,
    Saving,
    State,
    Stored,
    misfits,
    of_rank,
    tensors_in,
)
from penstock.config import UNSET, ConfigError, read_json
from penstock.families.described import FORMER_STATE, refuse_cut_off
from penstock.partial_state import part_of
from penstock.runtime import ShardedAdamW
from penstock.runtime.expert_parallel.optimizers import watch_optimizer
from penstock.runtime.features.sharded_optimizer.adamw import OPTIONS, check_options
from penstock.runtime.features.sharded_optimizer.share import MASTER
from penstock.topology import Control
from penstock.train.checkpoint import TYPES
from penstock.train.run_state import OPTIMIZER, of_model, state_part, updated
from penstock.words import some_of
from penstock.writing import write_whole

STATE, GROUPS = "optimizer", "optimizer.json"
OF_STATE = re.compile(rf"{STATE}(-\d+)+\.safetensors|optimizer\.json")
"""Names of the files of an optimiser's state."""

WITHOUT = "without_state"
"""Key in a group for the names of parameters that were never updated."""

LIGHTNING = "lightning.ckpt"
"""The file, in the folder of a checkpoint, of what Lightning saves beside scheduled models."""

ADAPTERS = "adapter_config.json"
OF_ADAPTERS = re.compile(
    rf"{OF_STATE.pattern}|adapter_model\.safetensors(\.index\.json)?|adapter_config\.json|lightning\.ckpt"
)
"""Names of the files of a checkpoint of adapters."""

OWN = re.compile(rf"{OF_ADAPTERS.pattern}|model.*\.safetensors(\.index\.json)?|(generation_)?config\.json")
"""Names of the files of any checkpoint."""

SHARED_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay")
"""Settings of a group that a ShardedAdamW has."""

Group = dict[str, Any]
"""Settings of a group of parameters, and the parameters' names as `parameters`."""


_BEGUN: WeakKeyDictionary[Engine, Saving] = WeakKeyDictionary()
"""The checkpoint of each model that was begun last, and may be unfinished."""


def save_checkpoint(
    model: Any, optimizer: torch.optim.Optimizer, folder: str | Path, *, wait: bool = True
) -> Saving:
    """Save a scheduled model and its optimiser's state; all ranks call it together.

    The folder appears when it is complete. It replaces a folder of that name, from which all files stay that
    belong to no model or optimiser (a tokenizer, say). Of a model of peft only the adapters are saved.

    With `wait=False` a thread writes a copy of what this rank holds, for which it needs memory on the host,
    while training goes on; the folder appears in `finish` of what is returned, or in the next call of this
    function for the model, and all ranks call that.

    Args:
        model: What `parallelize` or `load_pretrained` has returned, or a model of peft around it.
        optimizer: The optimiser of its parameters.
        folder: The checkpoint's folder.
        wait: Whether the checkpoint is complete on return.

    Returns:
        The save, to be finished by its `finish` unless it is complete.

    Raises:
        ValueError: The optimiser has other parameters, or is of a kind whose state does not belong to single
            parameters.
        CheckpointError: On all ranks, where the folder, or the one that an earlier call has begun, cannot be
            written; an older one then stays.
    """
    path, engine = Path(folder).resolve(), engine_of(model)
    purpose = f"saving {path}"
    if (earlier := _BEGUN.pop(engine, None)) is not None:
        earlier.finish()
    states = _States.of(model, engine, optimizer)
    states.check()
    control, groups = engine.stack.machinery.control, states.text  # training may go on and change them

    def state_in(work: Path) -> State:
        if is_wrapped_by_peft(model):
            saved_together(model).save_pretrained(work)
            return states.held()
        plain = plain_class(model)
        check_names(model, plain, control)
        engine.warn_if_different()
        return model_state(model, plain, engine, work, purpose) | states.held()

    # A whole model beside adapters stays: adapters are saved without it, and possibly where it lies.
    files = AsWhole(
        path,
        partial(_close, groups),
        lambda name, new: bool((OF_ADAPTERS if ADAPTERS in new else OWN).fullmatch(name)),
    )
    begun = Saving(files, control, purpose, state_in, divide=_divide, copies=not wait)
    if wait:
        begun.finish()
    else:
        _BEGUN[engine] = begun
    return begun


def _close(groups: str, work: Path) -> None:
    """Write what names the files of ranks: the index of a model's, and whose the optimiser's state is."""
    close_model(work)
    write_whole(work / GROUPS, groups, durable=True)


def _divide(tensors: list[Outgoing], control: Control) -> Files:
    """Return the files of a rank: of the model as transformers has them, and one of the optimiser's state."""
    model, state = ([each for each in tensors if of_model(each.name) == its] for its in (True, False))
    return numbered(model, control) | of_rank(state, control, lambda _: STATE)


def save_optimizer(model: Any, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Save the state of a scheduled model's optimiser in a folder; all ranks call it together.

    Raises the errors of `save_checkpoint`.
    """
    engine, purpose = engine_of(model), f"saving the optimizer's state in {folder}"
    states, control = _States.of(model, engine, optimizer), engine.stack.machinery.control
    states.check()
    files = optimizer_files(Path(folder), states.text)
    Saving(files, control, purpose, lambda _: states.held(), divide=_divide, copies=False).finish()


def optimizer_files(folder: Path, groups: str) -> InPlace:
    """Return what moves the files of an optimiser's state, with the text on its groups, into a folder."""
    return InPlace(
        folder,
        partial(_close, groups),
        own=OF_STATE,
        entrances=(GROUPS,),
        unfinished=UNFINISHED_STATE,
        kept=FORMER_STATE,
    )


def load_optimizer(model: Any, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Give an optimiser the state that `save_checkpoint` has saved; for experts, this rank's share.

    Args:
        model: A scheduled model with the parameters that the optimiser has, in the same groups.
        optimizer: The optimiser of its parameters.
        folder: The checkpoint's folder.

    Raises:
        ValueError: If the state of another optimiser was saved, or none.
        ConfigError: If the file about its groups holds others.
    """
    path = Path(folder)
    if not (path / GROUPS).is_file():
        refuse_cut_off(path, FORMER_STATE)
        raise ValueError(f"{path} holds no {GROUPS}: save_checkpoint has not written it")
    states = _States.of(model, engine_of(model), optimizer)
    hint = "Copy it again, or go on from another checkpoint."
    saved = read_json(path / GROUPS, hint)
    try:
        named = [[*group["parameters"], *group[WITHOUT], *group] for group in saved]
    except (KeyError, TypeError):
        named = [[None]]
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in chain(*named)):
        raise ConfigError(str(path / GROUPS), UNSET, "holds no groups of an optimizer's parameters", hint)
    own, theirs = ([group["parameters"] for group in groups] for groups in (states.groups, saved))
    if own != theirs:
        differing = sorted(set(chain(*own)) ^ set(chain(*theirs)))[:3]
        names = ", ".join(differing) or "the same ones, in other groups or another order"
        raise ValueError(f"{path} has the state of an optimizer of other parameters: {names}")
    here, there = (set(chain(*groups)) for groups in (states.groups, saved))
    # Settings that versions of torch or schedulers of the rate have added stand on one side alone.
    lacking, unknown = sorted(here - there), sorted(there - here - {WITHOUT, "initial_lr"})
    if lacking and unknown:
        raise ValueError(
            f"{path} has the state of another kind of optimizer than {type(optimizer).__name__}: settings "
            f"{some_of(unknown)}, and not {some_of(lacking)}. Make the saved kind, or start from scratch"
        )
    for own_group, group in zip(states.groups, saved, strict=True):
        same = all((option in own_group) == (option in group) for option in OPTIONS)
        if not same or isinstance(optimizer, ShardedAdamW):  # one optimizer has options that the other lacks
            check_options({**own_group, **group})
    states.take(path, saved)


@dataclass(frozen=True)
class _States:
    """An optimiser's state by the names of its parameters; all ranks construct it, as shares are gathered."""

    optimizer: torch.optim.Optimizer
    model: Any
    names: Mapping[nn.Parameter, str]
    naming: ModelNaming

    @staticmethod
    def of(model: Any, engine: Engine, optimizer: torch.optim.Optimizer) -> _States:
        if isinstance(optimizer, ShardedAdamW):
            optimizer.flush()
            engine.stack.settle()
        names = {parameter: name for name, parameter in model.named_parameters()}
        strangers = sum(p not in names for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise ValueError(f"the optimizer has {strangers} parameters that are not the model's")
        return _States(optimizer, model, names, ModelNaming(engine.layout, engine.decoder, model))

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

    def check(self) -> None:
        """Raise ValueError for state that is not of single numbers, ShareError for another rank's state."""
        watch_optimizer(self.optimizer)
        for parameter in self.parameters:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                shape = getattr(value, "shape", ())
                if shape not in ((), parameter.shape):
                    raise ValueError(
                        f"{type(self.optimizer).__name__} keeps {key} {list(shape)} of "
                        f"{self.names[parameter]} {list(parameter.shape)}: only state of a parameter's own "
                        "shape can be saved"
                    )

    def held(self) -> State:
        """Return views of what this rank has of the state, also of frozen parameters."""
        state = updated(self.optimizer, self.model, self.naming)
        if isinstance(self.optimizer, ShardedAdamW):
            for parameter in self.parameters:
                for key, value in self.optimizer.updates.waiting.get(parameter, {}).items():
                    held = value if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu")
                    state |= state_part(self.names[parameter], key, held, self.naming)
        return state

    @property
    def text(self) -> str:
        """The content of the file that says whose the state is, without which there is none."""
        having = {_place(logical)[0] for logical in self.held()}
        groups = [
            {**group, WITHOUT: [name for name in group["parameters"] if name not in having]}
            for group in self.groups
        ]
        return json.dumps(groups, indent=1, default=_number)

    def take(self, folder: Path, saved: list[Group]) -> None:
        """Fill the optimiser's state from a folder, and its groups' settings from `saved`."""
        parameters = self.parameters
        numbers = {self.names[parameter]: number for number, parameter in enumerate(parameters)}
        states: dict[int, dict[str, Tensor]] = {}
        sharded = isinstance(self.optimizer, ShardedAdamW)
        shares = updated(self.optimizer, self.model, self.naming) if sharded else {}
        shared = {_place(logical)[0] for logical in shares}
        names, bare = (set(chain(*(group[kind] for group in saved))) for kind in ("parameters", WITHOUT))
        fresh = {logical: part for logical, part in shares.items() if _place(logical)[0] in bare}
        state = {logical: part for logical, part in shares.items() if logical not in fresh}
        try:
            stored = Stored(folder, [path.name for path in folder.glob(f"*{SUFFIX}")], prefix=OPTIMIZER)
            held = {_place(logical)[0] for logical in stored.whole}
            missing, unexpected = sorted(names - bare - held), sorted(held - names)
            if missing or unexpected:
                raise ValueError(
                    f"{folder} is not what {GROUPS} says: missing {some_of(missing)}, unexpected "
                    f"{some_of(unexpected)}. Copy both again, or go on from another checkpoint"
                )
            for logical, (shape, dtype) in stored.whole.items():
                name, key = _place(logical)
                if name not in shared and (sharded or key != MASTER):
                    parameter = parameters[numbers[name]]
                    tensor = torch.empty(parameter.shape if shape else (), dtype=dtype, device="cpu")
                    states.setdefault(numbers[name], {})[key] = tensor
                    state |= state_part(name, key, tensor, self.naming)
            # AdamW has no such weights, and a share makes them of the model's.
            spare = {
                logical for logical in stored.whole.keys() ^ state.keys() if _place(logical)[1] == MASTER
            }
            whole = {logical: each for logical, each in stored.whole.items() if logical not in spare}
            state = {logical: part for logical, part in state.items() if logical not in spare}
            if (misfit := misfits(state, whole, state, TYPES)) is not None:
                raise DamagedError(misfit)
            stored.load(state)
        except DamagedError as error:
            raise ValueError(
                f"{folder} has no state of this optimizer: {error}. Copy it again, or go on from another "
                "checkpoint"
            ) from error
        if isinstance(self.optimizer, ShardedAdamW):  # its shares are filled already
            for _, box in tensors_in(fresh):
                box.zero_()
            self.optimizer.updates.waiting = {parameters[number]: kept for number, kept in states.items()}
            for own_group, group in zip(self.optimizer.param_groups, saved, strict=True):
                own_group.update({key: group[key] for key in SHARED_SETTINGS if key in group})
            return
        groups, first = [], 0
        for own_group, group in zip(self.optimizer.param_groups, saved, strict=True):
            settings = {key: value for key, value in group.items() if key not in ("parameters", WITHOUT)}
            last = first + len(group["parameters"])
            groups.append({**own_group, **settings, "params": list(range(first, last))})
            first = last
        watch_optimizer(self.optimizer)
        for number, parameter in enumerate(self.parameters):
            if number in states and (part := part_of(parameter)) is not None:
                kept = states[number].items()
                states[number] = {key: part.spread(each) if each.dim() else each for key, each in kept}
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})


def _place(logical: str) -> tuple[str, str]:
    """Return whose tensor of an optimiser's state it is, by its parameter's name, and its key there."""
    name, _, key = logical.removeprefix(OPTIMIZER).rpartition(".")
    return name, key


def _number(setting: object) -> object:
    """Return a group's setting as JSON can hold it: a learning rate may be a tensor."""
    if isinstance(setting, Tensor):
        return setting.item()
    raise ValueError(f"an optimizer's setting {setting!r} cannot be saved: use a number")
