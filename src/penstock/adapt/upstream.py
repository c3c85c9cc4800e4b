"""Scheduled models in the loops of Accelerate and of transformers' Trainer, and so in TRL's trainers.

Both wrap every model that they are given on several processes, and save it as if every rank had all of it.
They have no place where a model could say otherwise. So a few functions of theirs are replaced by ones that
deal with scheduled models, and pass on all others unchanged.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import getattr_static
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from penstock.adapt.build import reload
from penstock.adapt.checkpoint import load_optimizer, save_checkpoint, save_optimizer
from penstock.adapt.engine import Engine, check_device, refuse_sharing
from penstock.adapt.scheduled import engine_if_any, is_wrapped_by_peft
from penstock.partial_state import Part, local_state, mark_held, part_of
from penstock.writing import replacing

SCHEDULER = "scheduler.pt"
_Pairs = list[tuple[Any, torch.optim.Optimizer]]


def follow_libraries() -> None:
    """Let Accelerate and Trainer deal with scheduled models from now on, if they are loaded; else later.

    A scheduled model calls it when it is made, and when Trainer asks it whether it is distributed.
    """
    if (accelerate := sys.modules.get("accelerate.accelerator")) is not None:
        replace_functions(
            accelerate.Accelerator,
            {
                "prepare": _prepare,
                "prepare_model": _prepare_model,
                "save_state": _save_state,
                "load_state": _load_state,
                "save_model": _save_alone,
            },
            _engine_of,
        )
    if (trainer := sys.modules.get("transformers.trainer")) is not None:
        replace_functions(
            trainer.Trainer,
            {
                "_move_model_to_device": _moved,
                "_wrap_model": _unwrapped,
                "_save": _save_model,
                "_save_optimizer_and_scheduler": _save,
                "_load_optimizer_and_scheduler": _load,
                "_load_from_checkpoint": _load_model,
                "_finalize_training": _finalize,
                "_load_best_model": _load_best,
            },
            _engine_of,
        )
    if (callbacks := sys.modules.get("trl.trainer.callbacks")) is not None:
        synced = {"_sync_target_model": _sync}
        replace_functions(callbacks.SyncRefModelCallback, synced, _engine_beside)
    if (vllm := sys.modules.get("trl.generation.vllm_generation")) is not None:
        replace_functions(vllm.VLLMGeneration, {"_iter_named_params": _whole_weights}, _engine_of)
    if (online := sys.modules.get("trl.experimental.online_dpo.online_dpo_trainer")) is not None:
        replace_functions(online.OnlineDPOTrainer, {"_move_model_to_vllm": _refuse_vllm}, _engine_of)
    for name in ("trl.trainer.dpo_trainer", "trl.trainer.kto_trainer"):
        if (module := sys.modules.get(name)) is not None:
            replace_functions(module, {"hash_module": _hash}, engine_if_any)


def replace_functions(
    kind: type | ModuleType, functions: Mapping[str, Callable[..., Any]], find: Callable[..., Any]
) -> None:
    """Replace functions of a class or module, once.

    Each gets what `find` makes of what it was called with, the function in whose place it is, and what it was
    called with. Where `find` returns None, nothing is scheduled, and the plain function runs.
    """
    for name, own in functions.items():
        plain = getattr(kind, name)
        if getattr(plain, "_penstock", False):
            continue

        @wraps(plain)
        def function(self: Any, *given: Any, plain: Any = plain, own: Any = own, **named: Any) -> Any:
            context = find(self, *given, **named)
            if context is None:
                return plain(self, *given, **named)
            return own(context, plain, self, *given, **named)

        function._penstock = True  # type: ignore[attr-defined]
        is_static = isinstance(getattr_static(kind, name), staticmethod)
        setattr(kind, name, staticmethod(function) if is_static else function)


def _engine_of(loop: Any, *given: Any, **named: Any) -> Engine | None:
    """Return the engine of a model that a function was given, or else of those that an object has."""
    models = [each for each in (*given, named.get("model")) if isinstance(each, torch.nn.Module)]
    held = getattr(loop, "_models", None) or [getattr(loop, "model", None)]
    engines = (engine_if_any(each) for each in models or held)
    return next((each for each in engines if each is not None), None)


def _engine_beside(model: Any, reference: Any, alpha: float) -> Engine | None:
    """Return the engine of a model whose reference model is not scheduled."""
    del alpha
    return engine_if_any(model) if engine_if_any(reference) is None else None


def _prepare(engine: Engine, plain: Callable[..., Any], accelerator: Any, *given: Any, **named: Any) -> Any:
    """Refuse what would spread parameters, some of it before it comes to the model."""
    del engine
    if accelerator.distributed_type in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        raise ValueError(
            f"accelerate would spread the parameters of a model that is spread already "
            f"({accelerator.distributed_type.value}): leave fsdp, deepspeed and megatron_lm out"
        )
    return plain(accelerator, *given, **named)


def _prepare_model(
    engine: Engine,
    plain: Callable[..., Any],
    accelerator: Any,
    model: Any,
    device_placement: Any = None,
    evaluation_mode: bool = False,
) -> Any:
    """Put mixed precision around a model, and nothing that averages gradients, which it does itself."""
    del device_placement, evaluation_mode
    follow_libraries()  # some trainers load more when they are made
    if accelerator.scaler is not None:
        raise ValueError(
            "fp16 scales losses, and ranks with different experts would not skip the same steps: use bf16"
        )
    if str(accelerator.state.dynamo_plugin.backend.value).upper() != "NO":
        raise ValueError(
            "torch_compile: a step runs the model in parts, which a compiler around the whole would never "
            "see, so nothing would be compiled: leave it out"
        )
    if accelerator.num_processes != engine.layout.world_size:
        raise ValueError(
            f"accelerate sees {accelerator.num_processes} of {engine.layout.world_size} processes: start "
            "them with torchrun or accelerate launch, so that each takes its own part of the data"
        )
    check_device(engine, torch.device(accelerator.device.type), "accelerate")
    refuse_sharing(engine, "Accelerate")
    engine.averages = engine.averages_own = True
    return plain(accelerator, model, device_placement=False, evaluation_mode=True)


def _save_state(
    engine: Engine,
    plain: Callable[..., Any],
    accelerator: Any,
    output_dir: str | None = None,
    *given: Any,
    **named: Any,
) -> str:
    """Save models and optimisers as `save_checkpoint` does, and what else there is as accelerate does."""
    del engine
    with _without_models(accelerator, "_save_model_state_pre_hook", _save_models):
        folder: str = plain(accelerator, output_dir, *given, **named)
    return folder


def _save_models(pairs: _Pairs, folder: str) -> None:
    for place, (model, optimizer) in enumerate(pairs):
        save_checkpoint(model, optimizer, place_of(folder, place))


def _load_state(
    engine: Engine,
    plain: Callable[..., Any],
    accelerator: Any,
    input_dir: str | None = None,
    *given: Any,
    **named: Any,
) -> None:
    """Read what `save_state` has written, on any number of ranks."""
    del engine
    with _without_models(accelerator, "_load_model_state_pre_hook") as (pairs, folders):
        plain(accelerator, input_dir, *given, **named)
    for place, (model, optimizer) in enumerate(pairs):
        load_weights(model, place_of(folders[0], place))
        load_optimizer(model, optimizer, place_of(folders[0], place))


def _save_alone(
    engine: Engine,
    plain: Callable[..., Any],
    accelerator: Any,
    model: Any,
    save_directory: str,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Save a model under the names of its state, to which all ranks bring their experts."""
    del engine, plain, safe_serialization  # nothing is pickled
    model = accelerator.unwrap_model(model)
    own = {"max_shard_size": max_shard_size, "save_original_format": False}
    shards = {} if is_wrapped_by_peft(model) else own
    model.save_pretrained(save_directory, is_main_process=accelerator.is_main_process, **shards)


def load_weights(model: Any, folder: Path) -> None:
    """Give a model the weights in a folder, or its adapters, which every rank reads whole."""
    if is_wrapped_by_peft(model):
        model.load_adapter(str(folder), model.active_adapter, is_trainable=True)
    else:
        reload(model, folder)


@contextmanager
def _without_models(
    accelerator: Any, place: str, begin: Callable[[_Pairs, str], None] = lambda pairs, folder: None
) -> Iterator[tuple[_Pairs, list[str]]]:
    """Take models and optimisers from accelerate, but not from hooks in `place`; yield pairs, and folders.

    `begin` comes before hooks and whatever accelerate does: a save that fails there has changed nothing.
    """
    models, optimizers, hooks = accelerator._models, accelerator._optimizers, getattr(accelerator, place)
    if len(models) != len(optimizers) or any(engine_if_any(model) is None for model in models):
        raise ValueError(
            f"accelerate has prepared {len(models)} models and {len(optimizers)} optimizers: save_state and "
            "load_state of scheduled models need one optimizer for each, and no other models. Use "
            "penstock.save_checkpoint for these and save others by themselves"
        )
    pairs = [(model, _plain(each)) for model, each in zip(models, optimizers, strict=True)]
    folders: list[str] = []

    def show(_: Any, *given: Any) -> None:
        *saved, folder = given  # where models are saved, a list of their states
        begin(pairs, folder)
        folders.append(folder)
        states = [[model.state_dict() for model in models if hooks] for _ in saved]
        shown = list(models)  # hooks may take models out of it
        for hook in hooks.values():
            hook(shown, *states, folder)

    accelerator._models, accelerator._optimizers = [], []
    setattr(accelerator, place, {0: show})
    try:
        yield pairs, folders
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers
        setattr(accelerator, place, hooks)


def place_of(folder: str, number: int) -> Path:
    """Return where a model is in a folder of accelerate: the first one in the folder itself."""
    return Path(folder) / f"model_{number}" if number else Path(folder)


def _moved(engine: Engine, plain: Callable[..., Any], trainer: Any, model: Any, device: torch.device) -> None:
    """Refuse to move the model, and the optimiser that sees its parameters, from where its steps run."""
    check_device(engine, device, "Trainer")
    plain(trainer, model, device)


def _unwrapped(
    engine: Engine, plain: Callable[..., Any], trainer: Any, model: Any, *given: Any, **named: Any
) -> Any:
    """Return the model itself; refuse to train something else with these settings."""
    del plain, given, named
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"this one process would train on all {trainer.args.n_gpu} GPUs, a part of the batch on each: "
            "start a process for each (torchrun --nproc-per-node), or show it one (CUDA_VISIBLE_DEVICES=0)"
        )
    if engine.layout.world_size > 1 and not trainer.args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices = False: ranks would weigh their tokens, and the router loss, "
            "differently; leave it True"
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "fsdp or deepspeed would spread the parameters of a model that is spread already: leave it out"
        )
    return model


def _save_model(
    engine: Engine,
    plain: Callable[..., Any],
    trainer: Any,
    output_dir: str | None = None,
    state_dict: Any = None,
) -> None:
    """Save the model, to which all ranks bring their experts."""
    del engine
    if trainer.args.should_save:
        plain(trainer, output_dir, state_dict)
    else:
        folder = trainer.args.output_dir if output_dir is None else output_dir
        trainer.model.save_pretrained(folder, is_main_process=False)


def _save(engine: Engine, plain: Callable[..., Any], trainer: Any, output_dir: str) -> None:
    """Save the optimiser's state of the whole model."""
    del engine, plain
    save_optimizer(trainer.model, _plain(trainer.optimizer), output_dir)
    if trainer.args.should_save:
        with replacing(Path(output_dir) / SCHEDULER) as file:
            torch.save(trainer.lr_scheduler.state_dict(), file)


def _load(engine: Engine, plain: Callable[..., Any], trainer: Any, checkpoint: str | None) -> None:
    del engine, plain
    if checkpoint is not None:
        if not (file := Path(checkpoint) / SCHEDULER).is_file():
            raise ValueError(
                f"resume_from_checkpoint = {checkpoint}: it has no {SCHEDULER}. A save that was cut off, or "
                "with save_only_model = True, lacks what training goes on from: give another "
                "checkpoint, or start a new run from its model (from_pretrained)"
            )
        load_optimizer(trainer.model, _plain(trainer.optimizer), checkpoint)
        trainer.lr_scheduler.load_state_dict(torch.load(file, weights_only=True))


def _load_model(
    engine: Engine, plain: Callable[..., Any], trainer: Any, checkpoint: str, model: Any = None
) -> None:
    del engine
    model = trainer.model if model is None else model
    if is_wrapped_by_peft(model):  # every rank reads all adapters
        plain(trainer, checkpoint, model)
    else:
        reload(model, checkpoint)


def _finalize(engine: Engine, plain: Callable[..., Any], trainer: Any, *given: Any, **named: Any) -> Any:
    """End a training. All ranks load the best model or none, also where not every rank sees its folder."""
    control, own = engine.stack.machinery.control, trainer.state.best_model_checkpoint
    with control.waiting_for_files():  # the first rank may still be at its last checkpoint
        bests = control.gather(own, "naming the best model")
    trainer.state.best_model_checkpoint = own or next((best for best in bests if best is not None), None)
    return plain(trainer, *given, **named)


def _load_best(engine: Engine, plain: Callable[..., Any], trainer: Any) -> None:
    """Load the best model; where its folder is gone the run is not lost, and keeps the last one."""
    del plain
    best = trainer.state.best_model_checkpoint
    if not engine.stack.machinery.control.any(not Path(best).is_dir(), "looking for the best model"):
        trainer._load_from_checkpoint(best)
    elif trainer.args.should_save:
        warnings.warn(
            f"load_best_model_at_end: not every rank sees {best}, so the model stays that of the last step",
            stacklevel=2,
        )


@torch.no_grad()
def _sync(engine: Engine, plain: Callable[..., Any], model: Any, reference: Any, alpha: float) -> None:
    """Move a whole reference model towards a model, of which every rank brings its parts."""
    del plain
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), target in pairs:
        if (part := part_of(parameter)) is not None:
            whole = part.spread(parameter).full_tensor()
        elif parameter.shape == target.shape:
            whole = parameter
        else:
            raise ValueError(
                f"sync_ref_model: {name} is shared by ranks (etp_size = {engine.layout.etp_size}) in parts "
                "that are not brought together here: give the trainer a parallelized ref_model"
            )
        target.mul_(1.0 - alpha).add_(whole, alpha=alpha)


def _whole_weights(
    engine: Engine, plain: Callable[..., Any], generation: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what vLLM is to have, whole, under the names that TRL gives it; every rank brings its parts."""
    if engine.layout.etp_size > 1:
        raise ValueError(
            f"use_vllm: experts are shared by ranks (etp_size = {engine.layout.etp_size}) in parts that are "
            "not brought together here: leave one of the two out"
        )
    mark_held(generation.model)
    parts: dict[int, Part] | None = None
    for name, tensor in plain(generation):
        if parts is None:  # adapters are in the weights by now
            held = ((p.data_ptr(), part_of(p)) for p in generation.model.parameters())
            parts = {place: part for place, part in held if part is not None}
        part = parts.get(tensor.data_ptr())
        yield name, tensor if part is None else part.spread(tensor).full_tensor()


def _refuse_vllm(engine: Engine, plain: Callable[..., Any], trainer: Any) -> None:
    if engine.layout.ep_size * engine.layout.etp_size > 1:
        raise ValueError(
            f"use_vllm: {type(trainer).__name__} would give vLLM one rank's experts for all: leave it out"
        )
    plain(trainer)


def _hash(engine: Engine, plain: Callable[..., str], model: Any) -> str:
    """Return a hash of all ranks' weights, which names a file of what they compute; ranks hash their own."""
    held = SimpleNamespace(state_dict=lambda: local_state(model.state_dict()))
    return "".join(engine.stack.machinery.control.gather(plain(held), "hashing weights"))


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimiser, which accelerate may have wrapped."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
