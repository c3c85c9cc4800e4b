"""The whole state of a model whose experts are spread over ranks, under its original names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.adapt.cut import Cut
from penstock.adapt.decoder import CutLayer
from penstock.adapt.engine import Engine
from penstock.families.adapters import ExpertAxis, axes_of, core_of
from penstock.families.described import quiet
from penstock.families.experts import sharding_of_experts
from penstock.partial_state import check_marks, without_marks
from penstock.sharding import Sharding, sharding_of
from penstock.words import some_of


def whole_state(
    model: nn.Module, engine: Engine, given: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor] | None:
    """Return the state dictionary of the model on one process, at rank 0; None on the others.

    All ranks call it. given: this rank's own state dictionary, where it is not the model's. Tensors of
    experts are joined at rank 0, which needs the memory of the whole model.
    """
    machinery = engine.stack.machinery
    layout, control = machinery.layout, machinery.control
    own = model.state_dict()  # all ranks join the state of adapters in it
    state = without_marks(own if given is None else given)
    named, whole = dict(model.named_parameters(remove_duplicate=False)), dict[int, Tensor]()
    for name, sharding in shardings_of_state(model, engine).items():
        members, key = layout.mesh.members(0, sharding.axes), id(named[name])
        if layout.rank not in members:
            continue
        if key not in whole:  # embeddings may be tied, and layers share experts
            parts = control.collect(state[name].detach().cpu(), members, 0, f"saving {name}")
            whole[key] = sharding.join(parts) if parts else state[name]
        state[name] = whole[key]
    return state if control.rank == 0 else None


def shardings_of_state(model: nn.Module, engine: Engine) -> dict[str, Sharding]:
    """Return which part this rank has of parameters that ranks share, by all of their names."""
    experts = expert_names(model, engine)
    found: dict[str, Sharding] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sharding = sharding_of(parameter)
        if name in experts:
            sharding = sharding_of_experts(parameter.shape, sharding, engine.layout)
        if sharding is not None:
            found[name] = sharding
    return found


def expert_names(model: nn.Module, engine: Engine) -> dict[str, nn.Parameter]:
    """Return experts' weights, of which this rank has a share, by name; by several if layers share them."""
    held = {p for cut in _cuts(engine) for p in core_of(cut.experts).parameters()}
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if p in held}


def expert_axes(model: nn.Module, engine: Engine) -> dict[str, ExpertAxis]:
    """Return how experts lie in all parameters of which this rank has a share, adapters too, by name."""
    cuts = _cuts(engine)
    for cut in cuts:
        cut.follow()  # adapters may have been put on since the last pass
    axes = {p: axis for cut in cuts for p, axis in axes_of(cut.experts).items()}
    return {name: axes[p] for name, p in model.named_parameters(remove_duplicate=False) if p in axes}


def _cuts(engine: Engine) -> list[Cut]:
    return [part.cut for part in engine.decoder.parts if isinstance(part, CutLayer)]


def check_names(model: Any, plain: Any, given: Mapping[str, Tensor] | None = None) -> None:
    """Raise ValueError unless what is saved has the names that a model of this configuration has.

    plain: the class of that model. given: what is saved, where it is not the model's own state. Adapters that
    transformers itself has put into a model are saved by themselves, without the model. Raises ShareError if
    `given` has the experts of another rank.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        return
    own = model.state_dict()  # ranks join adapters in it, even where one of them is given a state
    check_marks(own if given is None else given, own)
    try:
        with quiet(), torch.device("meta"):
            wanted = plain(copy.deepcopy(model.config)).state_dict().keys()
    except Exception as error:  # a class from elsewhere may raise anything
        warnings.warn(
            f"names of what is saved were not compared: no {plain.__name__} can be built from its "
            f"configuration alone ({type(error).__name__}: {error})",
            stacklevel=3,
        )
        return
    found = without_marks(own if given is None else given).keys()
    missing, unexpected = sorted(wanted - found), sorted(found - wanted)
    if missing or unexpected:
        raise ValueError(
            f"this is no {plain.__name__} of its configuration any more, and transformers would not read "
            f"what is saved: missing {some_of(missing)}; unexpected "
            f"{some_of(unexpected)}. Adapters of peft: merge them first (merge_and_unload), or "
            "save them alone (save_pretrained of the PeftModel)"
        )
