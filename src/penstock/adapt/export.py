"""The whole state of a model whose experts are spread over ranks, under its original names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.adapt.engine import Engine
from penstock.mesh import Group


def whole_state(
    model: nn.Module, engine: Engine, given: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor] | None:
    """The state dictionary of the model on one process, at rank 0; None on the others. All ranks call it.

    given: this rank's own state dictionary, where it is not the model's. Tensors of experts are put together
    at rank 0, which needs the memory of the whole model.
    """
    machinery = engine.stack.machinery
    layout, control = machinery.layout, machinery.control
    state: dict[str, Any] = dict(model.state_dict() if given is None else given)
    if layout.ep_size > 1:
        members = layout.mesh.members(0, Group.EXPERT)
        for name in expert_names(model, engine):
            if layout.rank in members:
                parts = control.collect(state[name].detach().cpu(), members, 0, f"saving {name}")
                state[name] = torch.cat(parts) if parts else state[name]
    return state if control.rank == 0 else None


def expert_names(model: nn.Module, engine: Engine) -> list[str]:
    """The names of all parameters of which this rank has a share."""
    layers = range(len(engine.decoder.parts))
    held = {id(p) for layer in layers for p in engine.decoder.expert_parameters(layer)}
    return [name for name, p in model.named_parameters() if id(p) in held]
