"""Scheduled models in a `LightningModule`, under the Trainer of Lightning.

Its strategies wrap the whole module in DistributedDataParallel, and rank 0 writes a checkpoint of what it
has. Here a scheduled model is left out of the one, and of the other a folder is made, to which all ranks
bring what they hold: it is a checkpoint of Penstock, which transformers reads, with Lightning's own file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.adapt.checkpoint import LIGHTNING, load_optimizer, save_checkpoint, save_optimizer
from penstock.adapt.engine import check_device, refuse_sharing
from penstock.adapt.scheduled import engine_if_any, engine_of
from penstock.adapt.upstream import load_weights, place_of, replace_functions
from penstock.writing import remove_tree

PACKAGES = ("lightning.pytorch", "pytorch_lightning")

AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
"""Lightning's callbacks with a model of their own."""

FOLDER = "penstock_folder"
"""Key, in what Lightning reads of a checkpoint, of the folder that it was in."""


def follow_lightning() -> None:
    """Let Lightning's strategies deal with scheduled models from now on, if they are loaded; else later."""
    for package in PACKAGES:
        for (module, kind), functions in REPLACED.items():
            if (strategies := sys.modules.get(f"{package}.strategies.{module}")) is not None:
                replace_functions(getattr(strategies, kind), functions, _held)


@dataclass(frozen=True)
class _Held:
    """The scheduled models, or models of peft around them, of a module, by their names in it."""

    module: nn.Module
    models: Mapping[str, Any]

    def has(self, name: str) -> bool:
        """Return whether a parameter, a buffer or an entry of a state dict belongs to one of them."""
        return any(name.startswith(f"{own}.") for own in self.models)

    def owner(self, optimizer: Any) -> Any:
        """Return the model whose parameters an optimiser has, all of them; None if it has none of any."""
        given = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, model in self.models.items():
            own = {id(p) for p in model.parameters()}
            if given <= own:
                return model
            if given & own:
                raise ValueError(
                    f"an optimizer has parameters of the scheduled model {name!r} and others: their states "
                    "are saved apart, so give the others an optimizer of their own"
                )
        return None

    def in_folder(self, folder: str | Path) -> Iterator[tuple[Any, Path]]:
        """Yield the models and their places in the folder of a checkpoint."""
        for number, model in enumerate(self.models.values()):
            yield model, place_of(str(folder), number)

    def optimizers_in(self, folder: str | Path, optimizers: Sequence[Any]) -> Iterator[tuple[Any, Any, Path]]:
        """Yield the models' optimisers with model and place: a model's first one lies beside it."""
        for model, place in self.in_folder(folder):
            own = (each for each in optimizers if self.owner(each) is model)
            for number, optimizer in enumerate(own):
                yield optimizer, model, place / f"optimizer_{number}" if number else place


def _held(strategy: Any, *given: Any, **named: Any) -> _Held | None:
    """Return the scheduled models that a strategy trains; None if there are none."""
    del given, named
    module: nn.Module | None = strategy.lightning_module
    models: dict[str, Any] = {}
    for name, submodule in () if module is None else module.named_modules():
        if engine_if_any(submodule) is not None and not any(name.startswith(f"{outer}.") for outer in models):
            models[name] = submodule
    return _Held(module, models) if module is not None and models else None


# ---- training ----------------------------------------------------------------------------------------------


def _begin(held: _Held, plain: Callable[..., Any], strategy: Any, trainer: Any) -> None:
    """Make ready for training: the loss of labels is that of a rank's samples, and gradients are averaged."""
    if getattr(strategy.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            "precision='16-mixed' scales losses, and ranks with different experts would not skip the same "
            "steps: use 'bf16-mixed'"
        )
    for callback in trainer.callbacks:
        kinds = [kind for kind in type(callback).__mro__ if kind.__module__.startswith(PACKAGES)]
        if any(kind.__name__ in AVERAGING for kind in kinds):
            raise ValueError(
                f"{type(callback).__name__}: its average would be missing in checkpoints. Keep a "
                "torch.optim.swa_utils.AveragedModel of the model, and save its module by save_pretrained on "
                "all ranks"
            )
    for model in held.models.values():
        engine = engine_of(model)
        if trainer.world_size != engine.layout.world_size:
            raise ValueError(
                f"Lightning has {trainer.world_size} processes, and the model is spread over "
                f"{engine.layout.world_size}: start the program with torchrun, set devices and num_nodes to "
                "match, and use strategy='ddp'"
            )
        check_device(engine, strategy.root_device, "Lightning")
        refuse_sharing(engine, "Lightning")
        engine.averages = engine.averages_own = True
    plain(strategy, trainer)


def _set_up(held: _Held, plain: Callable[..., Any], strategy: Any, trainer: Any) -> None:
    """Let no rank get the parameters of another one, before training or evaluation."""
    names = [name for name, _ in (*held.module.named_parameters(), *held.module.named_buffers())]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        held.module, [name for name in names if held.has(name)]
    )
    plain(strategy, trainer)


def _configure_ddp(held: _Held, plain: Callable[..., Any], strategy: Any) -> None:
    """Put DistributedDataParallel around the module if it trains anything else: it averages that."""
    if any(p.requires_grad and not held.has(name) for name, p in held.module.named_parameters()):
        plain(strategy)


def _refuse(held: _Held, plain: Callable[..., Any], strategy: Any, trainer: Any) -> NoReturn:
    del held, plain, trainer
    raise ValueError(
        f"{type(strategy).__name__} would spread the parameters of a model that is spread already: use "
        "strategy='ddp'"
    )


# ---- checkpoints -------------------------------------------------------------------------------------------


def _state(held: _Held, plain: Callable[..., Any], strategy: Any) -> dict[str, Any]:
    """Return the state of all but the scheduled models."""
    return {name: each for name, each in plain(strategy).items() if not held.has(name)}


def _optimizer_state(held: _Held, plain: Callable[..., Any], strategy: Any, optimizer: Any) -> Any:
    """Return the state of an optimiser; nothing where it is saved with a model."""
    return plain(strategy, optimizer) if held.owner(optimizer) is None else {}


def _save(
    held: _Held,
    plain: Callable[..., Any],
    strategy: Any,
    checkpoint: Mapping[str, Any],
    filepath: str | Path,
    storage_options: Any = None,
) -> None:
    """Save a folder; all ranks call it. Lightning's own file comes last, and says that it is complete.

    The older one goes when `save_checkpoint` replaces the first model, until which its folder is whole.
    """
    if "://" in str(filepath):
        raise ValueError(f"{filepath}: checkpoints of scheduled models are folders of a file system")
    optimizers = strategy.optimizers if "optimizer_states" in checkpoint else []
    states = {place: (model, each) for each, model, place in held.optimizers_in(filepath, optimizers)}
    if strategy.is_global_zero and Path(filepath) not in states:
        remove_tree(Path(filepath) / LIGHTNING)
    for model, place in held.in_folder(filepath):
        if place in states:
            save_checkpoint(*states.pop(place), place)
        else:
            model.save_pretrained(place, is_main_process=strategy.is_global_zero)
    for place, (model, optimizer) in states.items():  # further ones of a model
        if strategy.is_global_zero:
            place.mkdir(exist_ok=True)
        save_optimizer(model, optimizer, place)
    plain(strategy, checkpoint, Path(filepath) / LIGHTNING, storage_options=storage_options)


def _read(
    held: _Held,
    plain: Callable[..., Any],
    strategy: Any,
    checkpoint_path: str | Path,
    *given: Any,
    **named: Any,
) -> dict[str, Any]:
    """Read Lightning's own file in a folder."""
    del held
    path = Path(checkpoint_path)
    if path.is_dir() and not (path / LIGHTNING).is_file():
        raise ValueError(
            f"{path} has no {LIGHTNING}: no Trainer of Lightning has written it, or not to its end"
        )
    if not path.is_dir():
        whole: dict[str, Any] = plain(strategy, checkpoint_path, *given, **named)
        return whole
    return {**plain(strategy, path / LIGHTNING, *given, **named), FOLDER: str(path)}


def _load(
    held: _Held, plain: Callable[..., Any], strategy: Any, checkpoint: Mapping[str, Any], strict: bool = True
) -> None:
    """Load all states; those of scheduled models from their folders, on any number of ranks."""
    if FOLDER not in checkpoint:
        plain(strategy, checkpoint, strict=strict)
        return
    here = {name: each for name, each in held.module.state_dict().items() if held.has(name)}
    plain(strategy, {**checkpoint, "state_dict": {**here, **checkpoint["state_dict"]}}, strict=strict)
    for model, place in held.in_folder(checkpoint[FOLDER]):
        load_weights(model, place)


def _load_optimizers(
    held: _Held, plain: Callable[..., Any], strategy: Any, checkpoint: Mapping[str, Any]
) -> None:
    if FOLDER not in checkpoint:
        plain(strategy, checkpoint)
        return
    states: Sequence[Any] = checkpoint["optimizer_states"]
    pairs: Iterator[tuple[torch.optim.Optimizer, Any]] = zip(strategy.optimizers, states, strict=True)
    for optimizer, state in pairs:
        if held.owner(optimizer) is None:
            optimizer.load_state_dict(state)
    for optimizer, model, place in held.optimizers_in(checkpoint[FOLDER], strategy.optimizers):
        load_optimizer(model, optimizer, place)


REPLACED: Mapping[tuple[str, str], Mapping[str, Callable[..., Any]]] = {
    ("strategy", "Strategy"): {
        "setup_optimizers": _begin,
        "lightning_module_state_dict": _state,
        "optimizer_state": _optimizer_state,
        "save_checkpoint": _save,
        "load_checkpoint": _read,
        "load_model_state_dict": _load,
        "load_optimizer_state_dict": _load_optimizers,
    },
    ("ddp", "DDPStrategy"): {"setup": _set_up, "configure_ddp": _configure_ddp},
    ("fsdp", "FSDPStrategy"): {"setup": _refuse},
    ("model_parallel", "ModelParallelStrategy"): {"setup": _refuse},
    ("deepspeed", "DeepSpeedStrategy"): {"setup": _refuse},
}
"""By module of strategies and class, functions and what stands in their place."""
