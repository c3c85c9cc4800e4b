"""Refusals of what cannot be done with a stack, with what to do instead.

Messages say "a scheduled model": who has called `penstock.parallelize` has never seen the stack inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.runtime.expert_parallel.guard import gathered_by_composables
from penstock.step.shape import Updating


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


def check_updates(updating: Updating | None, updates: object | None) -> None:
    """Raise RuntimeError if the steps update parameters and no optimizer is given for that."""
    if updating is not None and updates is None:
        raise RuntimeError(
            "the steps of this stack sum gradients in shares, for a sharded optimizer, and it has none: "
            "build ShardedAdamW(stack, ...) before training, or the stack without `updating`"
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
    """Raise RuntimeError if parameters wait to be gathered, so that this rank has old values of some.

    Also raise if a pass that failed has updated only a part of them.
    """
    del args
    if stack.updates is None:
        return
    stack.updates.failed.refuse_parameters()
    if stack.updates.is_stale:
        raise RuntimeError(
            "parameters were updated during backward and are gathered in the next forward pass, so this rank "
            "has old values of what others own: call optimizer.flush() on all ranks first"
        )
