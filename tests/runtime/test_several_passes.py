"""What a step counts and tells is its own, whatever else runs between its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.runtime import PipelinedStack, TaskError
from tests.support.layouts import tiny_case
from tests.support.parity import stack_of

LENGTH = 6
PAIRS = ((0, 1), (0, 2), (1, 2), (2, 3))
"""The two experts of each kind of token."""
CASE = tiny_case(
    num_layers=1,
    hidden_size=4,
    num_heads=1,
    seq_len=LENGTH,
    vocab_size=len(PAIRS),
    top_k=2,
    expert_bias_rate=0.01,
    batch=4,
)
FIRST, SECOND = [9, 16, 16, 7], [6, 12, 12, 6]
"""How often each expert is chosen in the batches below."""


def stack_with_known_routing() -> PipelinedStack:
    """Attention adds nothing, a token's embedding says which two experts it goes to."""
    stack = stack_of(0, CASE)
    with torch.no_grad():
        for name, parameter in stack.model.named_parameters():
            if name.endswith("self_attn.o_proj.weight"):
                parameter.zero_()
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            if name.endswith("gate.weight"):
                parameter.copy_(torch.eye(4))
            if name.endswith("model.embed_tokens.weight"):
                for kind, (best, second) in enumerate(PAIRS):
                    parameter[kind] = -1.0
                    parameter[kind, best], parameter[kind, second] = 2.0, 1.5
    return stack


def batch_of_kinds(*counts: int) -> Tensor:
    """Tokens of each kind, as samples of `LENGTH`."""
    kinds = [torch.full((count,), kind) for kind, count in enumerate(counts)]
    return torch.cat(kinds).view(-1, LENGTH)


def passes() -> tuple[PipelinedStack, Callable[[], Tensor], Callable[[], Tensor]]:
    """A stack, and what runs its first and its second batch forward."""
    stack = stack_with_known_routing()
    first, second = batch_of_kinds(8, 1, 8, 7), batch_of_kinds(6, 0, 6, 6)
    return stack, lambda: stack(first, first), lambda: stack(second, second)


def counted(stack: PipelinedStack) -> list[int]:
    (layer,) = (part.moe for part in stack.parts.parts if part.moe is not None)
    assert layer.gate.bias is not None
    found: list[int] = layer.gate.bias.counted_E.tolist()
    return found


def told(stack: PipelinedStack) -> list[int]:
    assert stack.statistics is not None
    (chosen_E,) = stack.statistics.chosen_YE.int().tolist()
    found: list[int] = chosen_E
    return found


def both() -> list[int]:
    return [a + b for a, b in zip(FIRST, SECOND, strict=True)]


def test_an_evaluation_between_forward_and_backward_counts_for_nothing() -> None:
    stack, first, second = passes()
    loss = first()
    with torch.no_grad():
        second()
    assert told(stack) == SECOND
    loss.backward()
    assert counted(stack) == FIRST == [9, 16, 16, 7]


@pytest.mark.parametrize("turned", [False, True])
def test_two_forward_passes_count_both(turned: bool) -> None:
    stack, first, second = passes()
    losses = [first(), second()]
    for loss in reversed(losses) if turned else losses:
        loss.backward()
    assert counted(stack) == both() == [15, 28, 28, 13]


def test_two_losses_summed_count_both() -> None:
    stack, first, second = passes()
    (first() + second()).backward()
    assert counted(stack) == both()


def test_a_loss_whose_backward_never_runs_counts_for_nothing() -> None:
    stack, first, second = passes()
    first()
    second().backward()
    assert counted(stack) == SECOND


def test_a_backward_that_is_refused_or_repeated_counts_once() -> None:
    stack, first, _ = passes()
    loss = first()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward of this loss has run already"):
        loss.backward()
    assert counted(stack) == FIRST


def test_a_pass_that_fails_in_between_changes_nothing() -> None:
    stack, first, _ = passes()
    loss = first()
    with pytest.raises(TaskError):
        stack(torch.full((4, LENGTH), 99), torch.zeros(4, LENGTH, dtype=torch.int64))
    assert told(stack) == FIRST
    loss.backward()
    assert counted(stack) == FIRST


def test_what_a_stack_tells_after_backward_is_of_that_step() -> None:
    """Metrics, records and recorded routing are read then."""
    stack, first, second = passes()
    loss = first()
    stack.eval()
    with torch.no_grad():
        second()
    forward_only = len(stack.records())
    stack.train()
    loss.backward()
    assert told(stack) == FIRST
    assert len(stack.records()) == len(stack.plan.graph.tasks) > forward_only


@pytest.mark.parametrize("train", [False, True])
def test_an_evaluation_does_not_change_the_dropout_of_the_next_step(train: bool) -> None:
    """In evaluation mode, and in training mode under no_grad, where dropout is on, too."""
    case = replace(CASE, model=replace(CASE.model, dropout=0.5))
    tokens = batch_of_kinds(8, 1, 8, 7)
    losses = []
    for evaluations in (0, 3):
        stack = stack_of(0, case)
        stack(tokens, tokens)
        stack.train(train)
        with torch.no_grad():
            between = [stack(tokens, tokens).item() for _ in range(evaluations)]
        assert len(set(between)) == (evaluations if train else min(1, evaluations))
        losses.append(stack.train()(tokens, tokens).item())
    assert losses[0] == losses[1]
