"""Checks of a model's layers, the shape of a step that follows, and refusals of what a stack cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Final, NoReturn
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.mesh import Group
from penstock.moe import MoELayer
from penstock.moe.config import BalanceGroup, MoEConfig
from penstock.placement import PlacementError
from penstock.runtime.expert_parallel.guard import gathered_by_composables
from penstock.runtime.parts import ModelParts
from penstock.sharding import shardings_of
from penstock.step import StepShape
from penstock.step.shape import Sharing, Updating
from penstock.topology import Control, Layout


def check_layers(layers: Sequence[MoELayer | None], moe: MoEConfig, layout: Layout) -> None:
    """Raise ValueError unless layers that a user built match the configuration and the layout."""
    for number, layer in enumerate(layers):
        if layer is None:
            continue
        for what, actual, wanted in (
            ("num_experts", layer.num_experts, moe.num_experts),
            ("ep_size", layer.ep_size, layout.ep_size),
            ("ep_rank", layer.ep_rank, layout.ep_rank),
            ("etp_size", layer.experts.shard.size, layout.etp_size),
            ("etp_rank", layer.experts.shard.rank, layout.etp_rank),
        ):
            if actual != wanted:
                why = f"layer {number} was built with {what} = {actual}, the stack with {wanted}"
                raise ValueError(f"{why}: build the layer with the stack's {what}")


def check_shards(model: nn.Module, parts: ModelParts, layout: Layout) -> None:
    """Raise ValueError unless the model's parts are those of this rank, and exist where they are needed.

    Ranks that share attention and each had a whole model would silently add it several times.
    """
    shardings = shardings_of(model)
    mesh, rank = layout.mesh, layout.rank
    for name, sharding in shardings.items():
        wanted = mesh.place(rank, sharding.axes), mesh.size(sharding.axes)
        if (sharding.index, sharding.count) != wanted:
            raise ValueError(
                f"{name} is part {sharding.index} of {sharding.count}, and this rank has part {wanted[0]} of "
                f"{wanted[1]}: build the model with the layout's TensorShard(layout.tp_rank, layout.tp_size)"
            )
    if layout.tp_size == 1:
        return
    cut = {id(model.get_parameter(name)) for name, s in shardings.items() if s.axes == Group.TENSOR}
    for layer in range(len(parts.parts)):
        if cut.isdisjoint(map(id, parts.replicated_parameters(layer))):
            raise ValueError(
                f"layer {layer} has no part of a shared parameter, and tp_size = {layout.tp_size} ranks "
                "share attention: each would compute all of it, and the sum be that many times too large. "
                "Build the model with shard=TensorShard(layout.tp_rank, layout.tp_size), or set "
                "parallel.tp_size=1"
            )


Placements = tuple[str | None, ...]
"""For every layer a digest of where its experts are; None for a dense layer."""


def placements_of(layers: Sequence[MoELayer | None]) -> Placements:
    """Return digests of where the layers' experts are, to compare."""
    return tuple(None if layer is None else layer.placement.digest for layer in layers)


def check_placements(mine: Placements, control: Control) -> Placements:
    """Return `mine` if all ranks have the same; else raise PlacementError, on all of them.

    Rows would meet the wrong experts, although shapes would fit. Costs an exchange of 32 bytes per layer.
    """
    everyone = control.gather(mine, "comparing where experts are")
    for number, digests in enumerate(zip(*everyone, strict=True)):
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise PlacementError(
                    f"layer {number}: rank {rank} has experts placed otherwise than rank 0. Build the layer "
                    "with the same placement on all ranks"
                )
    return mine


def check_not_moved(now: Placements, before: Placements) -> None:
    """Raise PlacementError if a layer was exchanged for one whose experts are elsewhere."""
    for number, (actual, wanted) in enumerate(zip(now, before, strict=True)):
        if actual != wanted:
            raise PlacementError(
                f"layer {number} was exchanged for one with its experts placed otherwise, which other ranks "
                "need not have. Build the new layer with the old one's placement, or build a new stack"
            )


def check_same(now: StepShape, before: StepShape) -> None:
    """Raise ValueError if the layers now lead to another shape than when the stack was built."""
    for field in fields(StepShape):
        actual, wanted = getattr(now, field.name), getattr(before, field.name)
        if actual != wanted:
            raise ValueError(
                f"the model's layers have changed: {field.name} is {actual} and was {wanted} when the stack "
                "was built, and a step's tasks depend on it. Build a new stack for the changed model."
            )


MADE_OF: Final = ("moe_layers", "exchange_counts", "shared_experts", "sharing")
"""Fields of a step's shape that layers decide, and no plan."""


def check_planned_for(planned: StepShape, own: StepShape) -> None:
    """Raise ValueError for a plan of other layers: it would leave out tasks, or run some that do nothing."""
    for name in MADE_OF:
        actual, wanted = getattr(planned, name), getattr(own, name)
        if actual != wanted:
            raise ValueError(
                f"the plan is for another model: its {name} is {actual}, and that of the layers is {wanted}. "
                "Plan for the stack's base_shape."
            )


def sharing_of(layout: Layout, balance: BalanceGroup) -> Sharing:
    """Return which ranks share what.

    Args:
        balance: The tokens over which balance is judged.
    """
    return Sharing(
        tp_size=layout.tp_size,
        etp_size=layout.etp_size,
        tokens=layout.tokens,
        judges_samples=balance != "global",
    )


def shape_of(
    layers: Sequence[MoELayer | None],
    sharing: Sharing,
    *,
    gathers_loads: bool = False,
    updating: Updating | None = None,
) -> StepShape:
    """Return the uncut shape of a step of these layers, which need the same kinds of tasks.

    Args:
        layers: The MoE layers of the model; None stands for a dense one.
        gathers_loads, updating: See StepShape.

    Raises:
        ValueError: If layers need different kinds of tasks.
    """
    moe = [layer for layer in layers if layer is not None]
    if not moe:
        return StepShape(moe_layers=(False,) * len(layers), sharing=sharing, updating=updating)
    dynamic = {layer.permutation.dynamic for layer in moe}
    legs = {layer.dispatch.hops for layer in moe}
    shared = {layer.shared is not None for layer in moe}
    for what, kinds in (("permutation", dynamic), ("dispatch", legs), ("shared experts", shared)):
        if len(kinds) > 1:
            raise ValueError(f"all MoE layers of a stack need the same kind of {what}: their tasks are alike")
    return StepShape(
        moe_layers=tuple(layer is not None for layer in layers),
        exchange_counts=dynamic.pop(),
        dispatch=legs.pop(),
        shared_experts=shared.pop(),
        sharing=sharing,
        gathers_loads=gathers_loads,
        updating=updating,
    )


# ---- refusals of what cannot be done with a stack, with what to do instead --------------------------------
#
# Messages say "a scheduled model": who has called `penstock.parallelize` has never seen the stack inside.


def refuse_data_parallel() -> NoReturn:
    """Raise TypeError: DistributedDataParallel around a stack would average gradients a second time."""
    raise TypeError(
        "a scheduled model needs no DistributedDataParallel or DataParallel: when loss.backward() returns, "
        "every gradient is synchronised already. Use the model as it is."
    )


def check_no_data_parallel(model: nn.Module) -> None:
    """Raise TypeError if DistributedDataParallel, around a module that holds the stack, manages its model."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        managed = {id(parameter) for parameter in ddp._module_parameters}
        if any(id(parameter) in managed for parameter in model.parameters()):
            refuse_data_parallel()


def check_not_sharded(model: nn.Module) -> None:
    """Raise TypeError if FSDP or `replicate` around a module that holds the stack manages its parameters."""
    gathered = set(gathered_by_composables())
    taken = any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules())
    if taken or any(id(parameter) in gathered for parameter in model.parameters()):
        raise TypeError(
            "a scheduled model's steps place and reduce its parameters: FSDP or replicate around it would "
            "reduce gradients a second time. Wrap the other modules only, each by itself."
        )


def raise_replaced(name: str) -> NoReturn:
    """Raise RuntimeError: a hook used a gradient during a step, which was not synchronised yet."""
    raise RuntimeError(
        f"the gradient of {name} was replaced or removed while backward was running, or the parameter was "
        "updated, before its gradient was summed over ranks and microbatches: the update is wrong. "
        "Update parameters after loss.backward(), not in a hook (register_post_accumulate_grad_hook)."
    )


def check_no_checkpoint() -> None:
    """Raise RuntimeError if activation checkpointing is around the whole stack.

    It would run the forward tasks again in the middle of the backward ones, on the same lanes.
    """
    recomputes = torch._C._current_graph_task_id() != -1
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if recomputes or (hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"):
        raise RuntimeError(
            "torch.utils.checkpoint around a whole scheduled model would run its transfers again in the "
            "middle of backward. Put it around modules inside the layers, such as their attention."
        )


def check_no_second_derivative() -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated again (create_graph=True).

    Autograd enables gradients in such a pass alone.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "backward(create_graph=True) of a scheduled model's loss: a step sums finished gradients over "
            "ranks, which have no graph, so they cannot be differentiated again. Call backward() without "
            "create_graph, and take second derivatives of the model outside of its steps"
        )


STACKS: WeakKeyDictionary[nn.Module, ReferenceType[Any]] = WeakKeyDictionary()
"""The stack that trains a model. The model itself has no reference to it, so it can be copied and pickled."""


def living_stacks() -> Iterator[Any]:
    """Yield the stacks that train models now."""
    yield from (stack for reference in list(STACKS.values()) if (stack := reference()) is not None)


def watch_model(model: nn.Module, stack: Any) -> None:
    """Make `model.state_dict()` raise, too, where it would have old values."""
    if model not in STACKS:
        model.register_state_dict_pre_hook(refuse_stale_model)
    STACKS[model] = ref(stack)


def refuse_stale_model(model: nn.Module, *args: object) -> None:
    """Raise as `refuse_stale` does, for the stack that trains `model`."""
    stack = STACKS[model]() if model in STACKS else None
    if stack is not None:
        refuse_stale(stack, *args)


def refuse_stale(stack: Any, *args: object) -> None:
    """Raise RuntimeError if this rank has old values of some parameters."""
    del args
    for feature in stack.features.values():
        feature.check_current()
