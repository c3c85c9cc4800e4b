"""A scheduled model: the class of transformers that it had, with steps run by Penstock in training mode.

Shapes: B samples, L tokens per sample.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from penstock.adapt.cut import RouterUse
from penstock.adapt.decoder import Decoder, Inputs
from penstock.adapt.engine import Engine, StepInputs, refuse_sharing
from penstock.adapt.passes import TOGETHER
from penstock.adapt.saving import expert_axes, save_model
from penstock.checkpoint.storage import together
from penstock.copies import Shared
from penstock.partial_state import refuse_pickle
from penstock.runtime import PipelinedStack
from penstock.runtime.parts import refuse_data_parallel
from penstock.sharding import sharding_of

DECODED = ("input_ids", "attention_mask", "position_ids")
"""Arguments of a step that its decoder gets, in their order."""


PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments of documents that are packed into one row, which some kernels read in place of `position_ids`."""

KNOWN = (
    *DECODED,
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "output_router_logits",
    "logits_to_keep",
    "use_cache",
    "return_dict",
)
"""Arguments of a training step with labels."""


LIBRARIES: list[Callable[[], None]] = []
"""What lets libraries of training loops know scheduled models, those that are loaded by now."""


def schedule(model: nn.Module, engine: Engine) -> Engine:
    """Let `engine` run the training steps of `model`; returns it. The model's class keeps its name."""
    _change(
        model,
        {
            "forward": _forward,
            **(TOGETHER if hasattr(model, "generate") else {}),
            "save_pretrained": _save_pretrained,
            "num_parameters": _num_parameters,
            "device_mesh": property(lambda self: engine_of(self).stack.machinery.meshes),
            "__reduce_ex__": _reduced,
            "gradient_checkpointing_enable": _recompute,
            "gradient_checkpointing_disable": _keep,
            # Refused at the first access; next it would copy rank 0's experts.
            "_ddp_params_and_buffers_to_ignore": property(lambda self: refuse_data_parallel()),
            "is_distributed_loading_by_transformers": property(_asked_by_trainer),
            "_apply": _apply,
        },
    )
    _tell_libraries()
    base = engine.decoder.base
    if base is not model:
        _change(base, {"forward": _decode, "__reduce_ex__": _reduced})
        base.__dict__["_penstock_model"] = Whole(model)
    model.__dict__["_penstock"] = engine
    return engine


def _tell_libraries() -> None:
    for follow in LIBRARIES:
        follow()


def _asked_by_trainer(self: Any) -> bool:
    """Return False, as for models that transformers has not spread; Trainer is loaded by now."""
    del self
    _tell_libraries()
    return False


def _change(module: nn.Module, own: dict[str, Any]) -> None:
    """Give a module a class of its name with these functions; each gets the one that it replaces first."""
    plain: Any = type(module)
    named = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    functions = {name: _around(plain, name, each) if callable(each) else each for name, each in own.items()}
    module.__class__ = type(plain.__name__, (plain,), {**named, **functions})


def _around(kind: Any, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of this name for a class below `kind`."""

    @wraps(getattr(kind, name))
    def method(self: Any, *given: Any, **named: Any) -> Any:
        return own(getattr(kind, name), self, *given, **named)  # as it is now: others may change the class

    # The marker does not load the compiler, which would look into the whole schedule.
    return _disable_dynamo(method) if name == "forward" else method


def _apply(plain: Any, model: Any, *given: Any, **named: Any) -> Any:
    _tell_libraries()  # Lightning, which is loaded by now, moves a model before it wraps one
    return plain(model, *given, **named)


class Whole:
    """The scheduled model that a decoder is a part of. A copy of the model's decoder belongs to the copy."""

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)

    @property
    def engine(self) -> Engine | None:
        """The engine that runs the decoder's steps; None where the decoder alone was copied."""
        model = self._model()
        return None if model is None else model.__dict__.get("_penstock")

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole | None:
        twin = memo.get(id(self._model()))
        return None if twin is None else Whole(twin)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled, before pickle stumbles over the reference to the model. Raises TypeError."""
        refuse_pickle("a part of a scheduled model")


def is_wrapped_by_peft(model: Any) -> bool:
    """Return whether a model is a PeftModel, which holds a model of transformers and its adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def engine_if_any(model: Any) -> Engine | None:
    """Return the engine of a scheduled model, also inside a model of peft; None for other models."""
    inner = model.get_base_model() if is_wrapped_by_peft(model) else model
    engine: Engine | None = getattr(inner, "__dict__", {}).get("_penstock")
    return engine


def engine_of(model: Any) -> Engine:
    """Return the engine of a scheduled model, also inside a model of peft.

    Raises:
        ValueError: For any other model.
    """
    if (engine := engine_if_any(model)) is None:
        raise ValueError(
            f"{type(model).__name__} is no scheduled model: give what parallelize or load_pretrained has "
            "returned, and nothing around it"
        )
    return engine


def plain_class(model: Any) -> Any:
    """Return the class that a scheduled model had before."""
    return type(model).__mro__[1]


def stack_of(model: Any) -> PipelinedStack:
    """Return the stack that runs the steps of a scheduled model, for a `ShardedAdamW`."""
    return engine_of(model).stack


def _forward(plain: Any, model: Any, /, *arguments: Any, **named: Any) -> Any:
    if arguments:
        named.update(zip(DECODED, arguments, strict=False))
        if len(arguments) > len(DECODED):
            raise ValueError(f"give all but {', '.join(DECODED)} by their names")
    engine = engine_of(model)
    labelled = named.get("labels") is not None or named.get("shift_labels") is not None
    if model.training and labelled and engine.decoder.computes_loss:
        return _step(model, engine, named)
    if model.training and torch.is_grad_enabled():
        return _with_logits(model, plain, engine, named)
    with torch.no_grad() if engine.layout.world_size > 1 else nullcontext(), engine.passes.one():
        out = plain(model, **named)
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    if named.get("labels") is None or not trained:
        return out
    from penstock.adapt.outputs import EVALUATED, refuse_backward

    loss = refuse_backward(out[0].clone(), EVALUATED)
    if isinstance(out, tuple):
        return loss, *out[1:]
    out["loss"] = loss
    return out


def _with_logits(model: Any, plain: Any, engine: Engine, named: dict[str, Any]) -> Any:
    """Return what the model returns where a loss is made of logits, by the caller or by the model."""
    if engine.decoder.base is model:
        raise ValueError(
            f"{type(model).__name__} has no decoder of its own beside its head, so a loss of logits cannot "
            "be scheduled: give labels=..., or call model.eval() to get logits without gradients"
        )
    balances = _balances(model, named, engine.decoder)
    given = {**named, "output_router_logits": False, "return_dict": True} if balances else named
    with engine.balancing(balances) as request:
        out = plain(model, **given)
    if not balances:
        return out
    out["aux_loss"] = request.balance
    if out.get("loss") is not None and request.balance is not None:
        out["loss"] = out["loss"] + (engine.decoder.coefficient or 0.0) * request.balance
    return out if _as_dict(model, named) else replace(out).to_tuple()  # in the order of its fields


def _decode(plain: Any, base: Any, /, *arguments: Any, **named: Any) -> Any:
    """Run the forward pass of a decoder: in training the forward half of a step."""
    engine = None if (whole := base.__dict__["_penstock_model"]) is None else whole.engine
    if engine is None or engine.decoder.calls.inside.depth:
        return plain(base, *arguments, **named)
    if torch.is_grad_enabled() and (base.training or engine.balance_request is not None):
        named.update(zip(DECODED, arguments, strict=False))
        arguments = ()
        if any(p.requires_grad for p in base.parameters()):
            return _hidden_states(base, engine, named)
        engine.watch_outside()
        embeds = named.get("inputs_embeds")
        if engine.layout.world_size > 1 and embeds is not None and embeds.requires_grad:
            raise ValueError(
                "inputs_embeds with gradients (prompt tuning): frozen layers run without them on several "
                "ranks. Adapt the layers (LoRA), or train on one rank"
            )
    with nullcontext() if engine.layout.world_size == 1 else torch.no_grad(), engine.passes.one():
        return plain(base, *arguments, **named)


def _hidden_states(base: Any, engine: Engine, named: dict[str, Any]) -> Any:
    """Return what a decoder returns, of which the caller makes a loss."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    from penstock.adapt.outputs import LastOnly

    wanted = {
        name: getattr(base.config, name, False) if named.get(name) is None else named[name]
        for name in ("output_hidden_states", "output_router_logits")
    }
    others = (*wanted, "use_cache", "return_dict", "num_items_in_batch", "logits_to_keep")
    _check_known(named, (*DECODED, *others, *PACKED), "a training step without labels")
    request = engine.balance_request
    routers: RouterUse = "handed_out" if wanted["output_router_logits"] and request is None else "unused"
    if request is not None and request.wanted:
        routers = "balanced"
    states = engine.hidden_states(_inputs_of(named, None, routers))
    normed_BLM = engine.decoder.normed(states.hidden_BLM)
    if request is not None:
        request.balance = states.balance
    out = MoeModelOutputWithPast(last_hidden_state=normed_BLM)
    if states.routers_YTE:
        out["router_logits"] = states.routers_YTE
    if wanted["output_hidden_states"]:
        out["hidden_states"] = LastOnly(len(engine.decoder.layers), normed_BLM)
    return out.to_tuple() if named.get("return_dict") is False else out


def _step(model: Any, engine: Engine, named: dict[str, Any]) -> Any:
    """Return the loss of labels, which the step computes itself."""
    from penstock.adapt.outputs import LOGITS, STEPPED, StepOutput, refuse_backward

    _check_known(named, (*KNOWN, *PACKED), "a training step")
    items = named.get("num_items_in_batch")
    routers: RouterUse = "balanced" if _balances(model, named, engine.decoder) else "unused"
    given = _inputs_of(named, None if items is None else float(items), routers)
    if named.get("logits_to_keep") is not None:
        refuse_sharing(engine, "logits_to_keep in a training step")
    loss, aux = engine.step(given)
    precise = torch.promote_types(engine.decoder.dtype, torch.float32)
    aux = None if aux is None else refuse_backward(aux.to(precise, copy=True), STEPPED)
    out = StepOutput(loss=loss.to(precise), aux_loss=aux)
    LOGITS[out.loss] = (engine.logits_of_step(), named.get("logits_to_keep"))
    return out if _as_dict(model, named) else out.to_tuple()


def _as_dict(model: Any, named: dict[str, Any]) -> bool:
    """Return whether the model returns more than a tuple."""
    given = named.get("return_dict")
    return bool(model.config.return_dict if given is None else given)


def _check_known(named: dict[str, Any], known: Sequence[str], what: str) -> None:
    """Raise ValueError for arguments that a step does not know, or of which it cannot make sense."""
    unknown = [
        name
        for name, value in named.items()
        if name not in known and value is not None and value is not False
    ]
    tokens_BL, mask, positions = (named.get(name) for name in DECODED)
    if unknown or tokens_BL is None:
        why = f"{', '.join(unknown)} cannot be used in one" if unknown else "it begins with input_ids"
        raise ValueError(f"{what} of a scheduled model: {why}. It takes {', '.join(known)}")
    if tokens_BL.dim() != 2:
        raise ValueError(f"input_ids must be [samples, tokens], not {list(tokens_BL.shape)}")
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask must be one tensor in a training step, not {type(mask).__name__}")
    samples, length = tokens_BL.shape
    if positions is not None and positions.shape[-2:] not in ((samples, length), (1, length)):
        raise ValueError(
            f"position_ids must be [{samples}, {length}] or [1, {length}], as input_ids are, or several such "
            f"tables, not {list(positions.shape)}"
        )


def _inputs_of(named: dict[str, Any], valid: float | None, routers: RouterUse) -> StepInputs:
    """Return the inputs of a step. Raises ValueError where several rows have packed documents."""
    packed = {name: named[name] for name in PACKED if named.get(name) is not None}
    if packed and len(named["input_ids"]) != 1:
        raise ValueError(
            f"{', '.join(packed)}: documents are packed into one row, and input_ids are "
            f"{list(named['input_ids'].shape)}, of which a step makes microbatches: give one row"
        )
    return StepInputs(
        inputs=Inputs(
            mask_BL=named.get("attention_mask"),
            positions_BL=named.get("position_ids"),
            routers=routers,
            packed=packed,
        ),
        tokens_BL=named["input_ids"],
        labels_BL=named.get("labels"),
        shift_labels_BL=named.get("shift_labels"),
        valid=valid,
    )


def _balances(model: Any, named: dict[str, Any], decoder: Decoder) -> bool:
    """Return whether a step has a router loss."""
    balances = named.get("output_router_logits")
    if balances is None:  # where a model also sees or hears, its text configuration says it
        balances = getattr(model.config.get_text_config(), "output_router_logits", False)
    if balances and decoder.family.coefficient is None:
        raise ValueError(
            f"output_router_logits = True: how {type(model).__name__} weighs its router loss was not "
            "understood, since its family is not known or its code was changed: leave it off, or describe "
            "the family, see docs/extending.md"
        )
    return bool(balances) and decoder.coefficient is not None


def _save_pretrained(plain: Any, model: Any, save_directory: str | os.PathLike[str], **named: Any) -> None:
    del plain
    given = named.pop("state_dict", None)
    save_model(model, plain_class(model), engine_of(model), Path(save_directory), given, **named)


def _num_parameters(
    plain: Any, model: Any, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Count the parameters of the whole model, every expert once."""
    engine = engine_of(model)
    spread = expert_axes(model, engine.decoder).keys()
    left_out = model.get_input_embeddings().weight if exclude_embeddings else None
    total: int = plain(model, only_trainable, exclude_embeddings)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not only_trainable:
            cut = None if parameter is left_out else sharding_of(parameter)
            parts = (1 if cut is None else cut.count) * (engine.layout.ep_size if name in spread else 1)
            total += parameter.numel() * (parts - 1)
    return total


def saved_together(adapted: Any) -> Any:
    """Make all ranks save a model of peft around a scheduled model together, rank 0 its files; returns it."""
    if getattr(type(adapted).save_pretrained, "__wrapped__", None) is None:
        _change(adapted, {"save_pretrained": _save_adapters})
    return adapted


def _save_adapters(plain: Any, adapted: Any, save_directory: str | os.PathLike[str], **named: Any) -> None:
    engine = engine_of(adapted)
    engine.warn_if_different()
    state = adapted.state_dict()  # all ranks join the adapters of their experts, even if a state was given
    if named.get("state_dict") is None:
        named["state_dict"] = state
    named["is_main_process"] = True

    def save() -> None:
        plain(adapted, save_directory, **named)

    together(engine.stack.machinery.control, f"saving {save_directory}", save, rank=0)


class _State(dict[str, Any]):
    """The attributes of a model; a deep copy is that of a separate one, scheduled on the same machinery."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.__dict__)
        self._model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        twin = memo[id(self._model)]
        modules = {name: value for name, value in self.items() if name != "_penstock"}
        twin.__dict__.update(copy.deepcopy(modules, memo))
        return {"_penstock": copy.deepcopy(self["_penstock"], memo)}


def _reduced(plain: Any, model: Any, protocol: Any) -> Any:
    """Return the reduction of a model for copies: peft's would find a `__deepcopy__` of the model in it."""
    del plain, protocol
    attributes = model.__dict__
    return _empty, (_Copied(type(model)),), _State(model) if "_penstock" in attributes else attributes


@dataclass(frozen=True)
class _Copied(Shared):
    """The class of a model that is copied; what pickles a model comes here first, and is refused."""

    kind: type

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle(f"a scheduled {self.kind.__name__}")


def _empty(copied: _Copied) -> Any:
    """Return a model without attributes, to be filled."""
    return object.__new__(copied.kind)


def _recompute(
    plain: Any,
    model: Any,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    every_n_layers: int = 1,
    offload: bool = False,
) -> None:
    """Recompute layers and experts in backward, from the next step on; no rows are sent a second time."""
    del plain, gradient_checkpointing_kwargs  # torch's way of recomputing is decided here
    if every_n_layers != 1 or offload:
        raise ValueError(
            f"every_n_layers = {every_n_layers}, offload = {offload}: a scheduled model computes all of its "
            "layers again, and moves nothing to the host: leave both out"
        )
    engine_of(model).recompute("blocks")


def _keep(plain: Any, model: Any) -> None:
    """Keep everything that backward needs."""
    del plain
    engine_of(model).recompute("none")
