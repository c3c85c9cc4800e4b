"""`penstock.load_pretrained`: a model from a folder, of which every rank reads only what it will hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.adapt.build import machinery_for, scheduled, shared_as
from penstock.adapt.guess import brought_by, guess
from penstock.adapt.planning import choice_of
from penstock.adapt.scheduled import engine_of, plain_class
from penstock.adapt.tensor import TensorShares
from penstock.decision import Decision
from penstock.dtensors import local_state
from penstock.families.experts import Shares, keep_shares
from penstock.families.inspection import Found, look
from penstock.families.known import FAMILIES, family_of
from penstock.families.model_folder import ModelFolder, folder_of
from penstock.families.weights import share_of_experts
from penstock.moe.experts import ExpertShard
from penstock.placement import ExpertPlacement
from penstock.step.shape import Updating
from penstock.topology import Layout, ParallelConfig
from penstock.topology.device_mesh import GroupSizes, Meshes
from penstock.topology.groups import TransportName

ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that keeps transformers' threads from reading ahead, which needs memory twice."""


def load_pretrained(
    folder: str | Path,
    *,
    ep_size: int | None = None,
    plan: str | Decision = "auto",
    tp_size: int | None = None,
    etp_size: int | None = None,
    mesh: Meshes | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ranks_per_node: int | None = None,
    timeout_s: float = 60.0,
    transport: TransportName = "direct",
    bound_factor: float | None = None,
    updating: Updating | None = None,
) -> Any:
    """Read a model of transformers from a folder and parallelize it; returns it, in training mode.

    Of the experts a rank reads its share only, tensor by tensor, so that it needs memory for what it will
    hold and for one layer's experts; what ranks share (`tp_size`, `etp_size`) each reads whole first. All
    ranks call this together. folder: configuration and safetensors, as save_pretrained writes them, or the
    name of a model on the Hugging Face hub. dtype: of the weights; None = as the configuration says. Other
    parameters: see `parallelize`. Raises ValueError for a family that is not known, or if a tensor is
    missing, of another shape, not finite, or not the model's, ConfigError for sizes that do not fit.
    """
    opened = ModelFolder.open(folder_of(folder))
    found = replace(skeleton(opened), bound_factor=bound_factor, choice=choice_of(plan))
    settings = ParallelConfig(ranks_per_node=ranks_per_node, timeout_s=timeout_s, transport=transport)
    sizes = GroupSizes(ep_size=ep_size, tp_size=tp_size, etp_size=etp_size)
    parallel = shared_as(settings, sizes, mesh, found, torch.device(device))
    with machinery_for(parallel, found.num_experts, torch.device(device)) as machinery:
        layout, kind = machinery.layout, dtype or opened.config.dtype or torch.float32
        share: list[Found] = []  # what one rank finds in what it reads, all must learn
        machinery.control.agreed(
            lambda: share.append(read_share(found, opened, layout, kind, device)), f"reading {folder}"
        )
        (found,) = share
        tensor = TensorShares.of(found, layout)
        scheduled(found, machinery, parallel, plan, tensor, updating)
        if tensor is not None:
            tensor.settle()
        return found.model.train()


def read_share(
    found: Found, opened: ModelFolder, layout: Layout, dtype: torch.dtype, device: torch.device | str
) -> Found:
    """Return the parts of a model with this rank's share of experts, read from its folder.

    Experts that ranks share are read whole, and cut afterwards.
    """
    held = ExpertPlacement.even(found.num_experts, layout.ep_size).held(layout.ep_rank)
    ids = {id(p) for experts in found.experts for p in experts.parameters()}
    named = found.model.named_parameters(remove_duplicate=False)
    rows = {name: len(p) // found.num_experts for name, p in named if id(p) in ids}
    tensors = share_of_experts(opened.tensors, found.model, rows, held, found.num_experts)
    plain: Any = type(found.model)

    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        """Begin a model with these experts alone: transformers makes it without memory."""
        plain.__init__(self, *arguments, **named)
        keep_shares(look(self, found.family).experts, held, found.num_experts)

    own = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__init__": begin}
    with _one_after_the_other():
        model = opened.read(type(plain.__name__, (plain,), own), tensors, dtype)
    model.__class__ = plain
    for name, parameter in found.model.named_parameters():  # transformers unfreezes what it reads
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    found, shard = found.of(model.to(device)), ExpertShard(layout.etp_rank, layout.etp_size)
    Shares(found.experts, range(len(held)), len(held), shard, found.family.form).settle()
    return found


def reload(model: Any, folder: str | Path) -> None:
    """Give a scheduled model the weights in a folder; a rank holds its share twice while they are read.

    Raises ValueError if the folder holds another model.
    """
    opened, dtype = ModelFolder.open(Path(folder), plain_class(model)), next(model.parameters()).dtype
    read = read_share(skeleton(opened), opened, engine_of(model).layout, dtype, "cpu").model.state_dict()
    mine = local_state(model.state_dict())
    if {name: tensor.shape for name, tensor in mine.items()} != {name: read[name].shape for name in read}:
        raise ValueError(f"{folder} holds another model than {type(model).__name__} is here")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(read[name])


def skeleton(opened: ModelFolder) -> Found:
    """Return the parts of the model in a folder, without its weights."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model = opened.model
    family = family_of(model)
    if family is None:
        guess(model, brought_by(model))  # where there is nothing to spread, parallelize would refuse it, too
        raise ValueError(
            f"{type(model).__name__} is of no family that Penstock knows ({', '.join(FAMILIES)}), and is "
            "looked at with its numbers: load it with from_pretrained, and call parallelize"
        )
    found = look(model, family)
    if (changed := found.changed_code()) and family.name in CONFIG_MAPPING_NAMES:
        raise ValueError(
            f"{', '.join(changed)} is not the function that transformers defines for {family.name}, and only "
            "with the model's numbers can it be seen whether steps compute the same: load the model with "
            "from_pretrained, and call parallelize"
        )
    return found


@contextmanager
def _one_after_the_other() -> Iterator[None]:
    """Let transformers read only what it needs next, inside this context, and not ahead with threads."""
    before = os.environ.get(ASYNC)
    os.environ[ASYNC] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ASYNC]
        else:
            os.environ[ASYNC] = before
