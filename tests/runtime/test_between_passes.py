"""What is done between a forward pass and its backward changes no gradient, or is refused on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.models import MoEDecoder
from penstock.models.decoder import CounterDropout
from penstock.runtime import PipelinedStack
from penstock.step.shape import Recompute
from penstock.topology.faults import ACTIVITY
from tests.support.cases import small_case as case
from tests.support.parity import Case, own_batch, stack_of
from tests.support.ranks import Pools

WHATS: tuple[Recompute, ...] = ("none", "experts", "blocks")
FROZEN = ("self_attn.q_proj.weight", "experts.w_up")
"""Of the lower block, one that all ranks have and one of experts."""
Action = Callable[[PipelinedStack], Any]


def step_of(what: Recompute) -> Case:
    """Dropout, noise on the gate's logits, a layer with experts and a dense one."""
    base = case(2, "noisy", "sort", "flat", "swiglu", "flowmoe")
    model = replace(base.model, num_layers=2, moe_layers=(0,), dropout=0.2)
    return replace(base, model=model, recompute=what)


class Counting(nn.Linear):
    """Keeps an average of what it has made, as normalisation by batches does."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, like.bias is not None, dtype=like.weight.dtype)
        self.load_state_dict(like.state_dict())
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.get_buffer("seen").mul_(0.5).add_(out.detach().double().abs().mean())
        return out + torch.tensor(1.0 / 3.0).to(out)  # in the default type


def model_of(stack: PipelinedStack) -> MoEDecoder:
    assert isinstance(stack.model, MoEDecoder)
    return stack.model


def built(rank: int, step: Case) -> PipelinedStack:
    stack = stack_of(rank, step)
    for block in model_of(stack).parts:
        block.self_attn.register_module("o_proj", Counting(block.self_attn.o_proj))
    for name, parameter in stack.model.named_parameters():
        parameter.requires_grad_(not (name.startswith("model.layers.0.") and name.endswith(FROZEN)))
    return stack


# ---- what changes nothing ----------------------------------------------------------------------------------


def nothing(stack: PipelinedStack) -> None:
    del stack


def thaw(stack: PipelinedStack) -> None:
    stack.requires_grad_(True)


def evaluate(stack: PipelinedStack) -> None:
    stack.eval()


def evaluate_a_part(stack: PipelinedStack) -> None:
    model_of(stack).parts[0].eval()


def draw(stack: PipelinedStack) -> None:
    del stack
    torch.rand(3)


def adopt_another_plan(stack: PipelinedStack) -> None:
    stack.adopt(stack.replan())


def clear_gradients(stack: PipelinedStack) -> None:
    stack.zero_grad(set_to_none=True)


def compute_otherwise(stack: PipelinedStack) -> None:
    stack.compute_in(torch.bfloat16)


@contextmanager
def other_default(stack: PipelinedStack) -> Iterator[None]:
    del stack
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


HARMLESS: tuple[Action, ...] = (
    thaw,
    evaluate,
    evaluate_a_part,
    draw,
    adopt_another_plan,
    clear_gradients,
    compute_otherwise,
    other_default,
)


def after(rank: int, step: Case, action: Action) -> dict[str, Tensor]:
    """The gradients of a step with this between its halves, and the buffers."""
    stack = built(rank, step)
    tokens, labels = own_batch(rank, step)
    torch.manual_seed(5 + rank)
    loss = stack(tokens, labels)
    done = action(stack)
    modes, trained = modes_of(stack), [p.requires_grad for p in stack.parameters()]
    if hasattr(done, "__enter__"):
        with done:
            loss.backward()
    else:
        loss.backward()
    assert modes == modes_of(stack) and trained == [p.requires_grad for p in stack.parameters()]
    found = {name: p.grad for name, p in stack.model.named_parameters() if p.grad is not None}
    return {**found, **dict(stack.model.named_buffers()), "drawn": torch.rand(1)}


def modes_of(stack: PipelinedStack) -> list[bool]:
    return [module.training for module in stack.modules()]


def all_after(rank: int, step: Case) -> dict[str, dict[str, Tensor]]:
    return {action.__name__: after(rank, step, action) for action in (nothing, *HARMLESS)}


@pytest.mark.parametrize("what", WHATS)
def test_gradients_are_those_of_the_forward_pass(ranks: Pools, what: Recompute) -> None:
    for found in ranks(2).run(all_after, step_of(what)):
        wanted = found.pop("nothing")
        found["draw"].pop("drawn")
        differing = [
            (name, key)
            for name, tensors in found.items()
            for key in wanted.keys() | tensors.keys()
            if (name, key) != ("draw", "drawn") and not same(tensors.get(key), wanted.get(key))
        ]
        assert not differing


def same(found: Tensor | None, wanted: Tensor | None) -> bool:
    return found is not None and wanted is not None and torch.equal(found, wanted)


def test_recomputation_changes_no_gradient_and_no_buffer(ranks: Pools) -> None:
    plain, *others = (ranks(2).run(after, step_of(what), nothing) for what in WHATS)
    for other in others:
        for found, wanted in zip(other, plain, strict=True):
            torch.testing.assert_close(found, wanted)


# ---- what is refused ---------------------------------------------------------------------------------------


def in_place(stack: PipelinedStack) -> None:
    with torch.no_grad():
        next(stack.model.parameters()).mul_(2)


def data_in_place(stack: PipelinedStack) -> None:
    """As an average of weights may be swapped in; the version counter stays."""
    for parameter in stack.model.parameters():
        parameter.data.mul_(2)


def other_data(stack: PipelinedStack) -> None:
    for parameter in stack.model.parameters():
        parameter.data = parameter.data * 2


def other_module(stack: PipelinedStack) -> None:
    model_of(stack).parts[0].attention_dropout = CounterDropout(0.7, place=1)


def update(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Action:
    def action(stack: PipelinedStack) -> None:
        for parameter in stack.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        kind(stack.model.parameters(), lr=0.1, **options).step()
        stack.zero_grad()

    return action


ALWAYS: dict[str, Action] = {
    "in place": in_place,
    "data in place": data_in_place,
    "AdamW": update(torch.optim.AdamW, foreach=True),
    "fused AdamW": update(torch.optim.AdamW, fused=True),
    "fused SGD": update(torch.optim.SGD, fused=True),
}
RECOMPUTED: dict[str, Action] = {"other data": other_data, "other module": other_module}
"""What a backward pass alone does not see."""


def refusals(rank: int, step: Case) -> dict[str, str]:
    """The error of every action, and that the stack trains on when the loss is computed again."""
    found = {}
    for name, action in {**ALWAYS, **RECOMPUTED}.items():
        stack = built(rank, step)
        tokens, labels = own_batch(rank, step)
        loss = stack(tokens, labels)
        action(stack)
        try:
            loss.backward()
        except RuntimeError as error:
            found[name] = type(error).__name__
            assert ("model.embed_tokens.weight" in str(error)) is (action is not other_module)
            assert ACTIVITY.failure is not None, "ranks that wait for this one are told"
            assert all(p.grad is None for p in stack.parameters())
            stack(tokens, labels).backward()
    return found


@pytest.mark.parametrize("what", WHATS)
def test_parameters_must_be_what_they_were(ranks: Pools, what: Recompute) -> None:
    wanted = ALWAYS if what == "none" else {**ALWAYS, **RECOMPUTED}
    for found in ranks(2).run(refusals, step_of(what)):
        assert found == dict.fromkeys(wanted, "RuntimeError")
