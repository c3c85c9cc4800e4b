"""Gradients and parameters that a sharded optimiser would leave out are refused, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.runtime import PipelinedStack, ShardedAdamW
from tests.runtime.features.sharded_optimizer.steps import Habits, build, loss_of
from tests.support.layouts import layout_case
from tests.support.parity import Case
from tests.support.ranks import Pools

CASE = layout_case((1, 1, 1, 1), "flowmoe", "gather")
NAMED = r"model\.embed_tokens\.weight has a gradient that no step of the stack has summed"


def sharded() -> tuple[PipelinedStack, ShardedAdamW]:
    stack, optimizer = build(0, CASE, Habits(), sharded=True)
    return stack, optimizer


def penalty(stack: PipelinedStack) -> Tensor:
    """Of one parameter: a term that the stack knows nothing of."""
    return stack.model.get_parameter("model.embed_tokens.weight").square().sum()


def added_to_the_loss(stack: PipelinedStack) -> None:
    """Computed before the forward pass, so that its backward comes after the step's."""
    term = penalty(stack)
    (loss_of(stack, 0, CASE, 0) + term).backward()


def by_itself(stack: PipelinedStack) -> None:
    loss_of(stack, 0, CASE, 0).backward()
    penalty(stack).backward()


def alone(stack: PipelinedStack) -> None:
    penalty(stack).backward()


@pytest.mark.parametrize("backward", [added_to_the_loss, by_itself, alone])
def test_a_gradient_that_is_in_no_share_is_not_left_out(backward: Callable[[PipelinedStack], None]) -> None:
    stack, optimizer = sharded()
    before = {name: p.detach().clone() for name, p in stack.named_parameters()}
    backward(stack)
    for update in (optimizer.step, optimizer.flush):
        with pytest.raises(RuntimeError, match=rf"{NAMED}.*optimizer\.zero_stage=0"):
            update()
    for name, parameter in stack.named_parameters():
        assert torch.equal(parameter, before[name]), name
    optimizer.zero_grad()
    loss_of(stack, 0, CASE, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("backward", [added_to_the_loss, by_itself])
def test_a_gradient_that_is_in_no_share_ends_a_pass_that_updates(
    backward: Callable[[PipelinedStack], None],
) -> None:
    stack, optimizer = sharded()
    with pytest.raises(RuntimeError, match=NAMED), optimizer.in_backward():
        backward(stack)


def without_embedding(rank: int, case: Case, shards: bool) -> str:
    """The refusal of a parameter that another optimiser is meant to train."""
    stack, _ = build(rank, case, Habits(releases=shards), sharded=True)
    embedding = stack.model.get_parameter("model.embed_tokens.weight")
    rest = [parameter for parameter in stack.parameters() if parameter is not embedding]
    optimizer = ShardedAdamW(stack, [{"params": rest, "weight_decay": 0.0}], lr=0.1, max_norm=1.0)
    with pytest.raises(RuntimeError) as caught:
        loss_of(stack, rank, case, 0).backward()
    optimizer.add_param_group({"params": [embedding], "weight_decay": 0.0})
    loss_of(stack, rank, case, 0).backward()
    before = embedding.detach().clone()
    optimizer.step()
    assert not torch.equal(embedding, before)
    optimizer.param_groups.pop()
    assert len(optimizer.state_dict()["state"]) == len(rest)
    embedding.requires_grad_(False)
    loss_of(stack, rank, case, 1).backward()
    optimizer.step()
    assert embedding not in optimizer.updates.steps  # it would begin anew, without moments
    state = optimizer.state_dict()
    assert len(state["state"]) == len(rest)
    optimizer.load_state_dict(state)
    return str(caught.value)


@pytest.mark.parametrize("shards", [False, True])
def test_a_parameter_in_no_group_is_refused(ranks: Pools, shards: bool) -> None:
    case = layout_case((2, 1, 1, 1), "flowmoe", "gather")
    for said in ranks(2).run(without_embedding, case, shards):
        assert said.startswith("model.embed_tokens.weight is trained and in no group of the ShardedAdamW")
        assert "add_param_group" in said and "optimizer.zero_stage=0" in said


@pytest.mark.parametrize("added", [False, True])
def test_an_update_reads_the_groups_of_its_time(added: bool) -> None:
    """Also where a parameter has changed its group after the backward pass."""
    stack, optimizer = sharded()
    weights = list(stack.parameters())
    half = len(weights) // 2
    optimizer.param_groups.clear()
    for chosen, lr in ((weights[:half], 0.0), (weights[half:], 0.1)):
        optimizer.add_param_group({"params": chosen, "lr": lr, "weight_decay": 0.0})
    loss_of(stack, 0, CASE, 0).backward()
    before = [p.detach().clone() for p in weights]
    if added:
        optimizer.param_groups[1]["params"] = []
        optimizer.add_param_group({"params": weights[half:], "lr": 0.0, "weight_decay": 0.0})
    else:
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]
    optimizer.step()
    moved = [not torch.equal(p, old) for p, old in zip(weights, before, strict=True)]
    assert not any(moved[half:])
    assert moved[:half] == [not added] * half
