"""Refusals of what a sharded optimiser would leave out: gradients that are in no share, and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from penstock.runtime.gradients.buckets import Buckets
from penstock.runtime.gradients.stand_in import has_gradient

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups as in `torch.optim`."""
NameOf = Callable[[nn.Parameter], str]


def group_numbers(groups: Groups) -> dict[int, int]:
    """Return the number of every parameter's group, by the parameter's id."""
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}


def refuse_unowned(groups: Groups, model: nn.Module) -> None:
    """Raise RuntimeError if a parameter of these groups has a gradient.

    The stack's steps leave none: it comes from a term that was added to the loss, or from another backward
    pass.
    """
    for group in groups:
        for parameter in group["params"]:
            if has_gradient(parameter):
                names = (name for name, other in model.named_parameters() if other is parameter)
                name = next(names, f"a parameter of shape {list(parameter.shape)}")
                raise RuntimeError(
                    f"{name} has a gradient that no step of the stack has summed (of a "
                    "term added to the stack's loss, or of another backward pass), and a sharded optimizer "
                    "updates from the sums alone: compute the term in the loss of the stack, or use "
                    "optimizer.zero_stage=0. optimizer.zero_grad() discards the gradient"
                )


def refuse_left_out(buckets: Buckets, groups: Groups, name_of: NameOf) -> None:
    """Raise RuntimeError if a step would sum gradients of a parameter that is in no group."""
    known = group_numbers(groups)
    for bucket in buckets.all:
        for parameter in (p for flat in bucket.flats for p in flat.parameters):
            if id(parameter) not in known:
                raise RuntimeError(
                    f"{name_of(parameter)} is trained and in no group of the ShardedAdamW, and no other "
                    "optimizer can update it, since its gradient is summed in shares: give it to "
                    "optimizer.add_param_group, freeze it (requires_grad_(False)) before the forward pass, "
                    "or use optimizer.zero_stage=0"
                )
