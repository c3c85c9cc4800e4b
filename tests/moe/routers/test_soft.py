"""SoftMoE's gate against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.gates import SoftRouter
from penstock.moe.routers import SoftChoice, Tokens
from tests.moe.routers.plain import Case, cases, check_values, dot, length, softmax, squared_log_partition
from tests.support.draws import draws


@draws(30)
@given(cases(), st.integers(1, 2))
def test_against_loops(case: Case, slots: int) -> None:
    made = SoftRouter(4, case.num_experts, slots_per_expert=slots)
    case.fill(made)
    x_TM, valid, columns = case.x(), case.valid, case.num_experts * slots
    choice = made(x_TM, case.tokens)
    assert isinstance(choice, SoftChoice)
    logits = [
        [made.logit_scale * dot(x_TM[t], phi) / (length(x_TM[t]) * length(phi)) for phi in made.weight]
        for t in range(case.count)
    ]
    nothing = torch.zeros(columns).double()
    weights = [torch.stack(softmax(row)) if valid[t] else nothing for t, row in enumerate(logits)]
    mix = [nothing] * case.count
    for sample in range(case.samples):
        there = [t for t in range(sample * case.length, (sample + 1) * case.length) if valid[t]]
        by_slot = [softmax([logits[t][n] for t in there]) for n in range(columns)]
        for i, t in enumerate(there):
            mix[t] = torch.stack([by_slot[n][i] for n in range(columns)])
    z = sum(
        (squared_log_partition(row) for t, row in enumerate(logits) if valid[t]), torch.zeros(()).double()
    )
    shape = (case.samples, case.length, case.num_experts, slots)
    found = [choice.mix_BLES, choice.weights, choice.sums.z]
    check_values(made, x_TM, found, [torch.stack(mix).view(shape), torch.stack(weights).view(shape), z])
    assert choice.sums.chosen_BE.tolist() == [[slots] * case.num_experts] * case.samples
    assert torch.equal(choice.sums.probability_BE, torch.zeros(case.samples, case.num_experts).double())


def states() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def test_slots_mix_tokens_and_tokens_mix_slots() -> None:
    choice = SoftRouter(6, 3, slots_per_expert=2)(states(), Tokens(samples=2))
    torch.testing.assert_close(choice.mix_BLES.sum(1), torch.ones(2, 3, 2))
    torch.testing.assert_close(choice.weights.sum((2, 3)), torch.ones(2, 4))


def test_samples_do_not_see_each_other() -> None:
    made, x_TM = SoftRouter(6, 3, slots_per_expert=2), states()
    whole, half = made(x_TM, Tokens(samples=2)), made(x_TM[:4], Tokens(samples=1))
    torch.testing.assert_close(whole.mix_BLES[:1], half.mix_BLES)
    torch.testing.assert_close(whole.weights[:1], half.weights)


def test_padding_behind_a_sample_changes_nothing() -> None:
    made, x_TM = SoftRouter(6, 3, slots_per_expert=2), states()
    valid_T = torch.arange(8) < 5
    padded, plain = made(x_TM, Tokens(valid_T=valid_T)), made(x_TM[:5], Tokens())
    torch.testing.assert_close(padded.mix_BLES[:, :5], plain.mix_BLES)
    torch.testing.assert_close(padded.weights[:, :5], plain.weights)
    torch.testing.assert_close(padded.sums.z, plain.sums.z)
    assert not padded.mix_BLES[:, 5:].any()
    assert not padded.weights[:, 5:].any()


def test_a_sample_of_nothing_but_padding_is_zero_and_not_nan() -> None:
    made, x_TM = SoftRouter(6, 3, slots_per_expert=2), states().requires_grad_()
    choice = made(x_TM, Tokens(samples=2, valid_T=torch.arange(8) < 4))
    assert not choice.mix_BLES[1].any()
    choice.mix_BLES.square().sum().backward()
    assert x_TM.grad is not None
    assert x_TM.grad.isfinite().all()


def test_an_expert_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="slots_per_expert = 0"):
        SoftRouter(6, 3, slots_per_expert=0)


def test_the_scale_starts_at_one_and_is_learnt() -> None:
    made = SoftRouter(6, 3, slots_per_expert=2)
    assert made.logit_scale.dim() == 0  # so initial weights and weight decay leave it alone
    assert made.logit_scale.item() == 1.0
    made(states(), Tokens()).mix_BLES.square().sum().backward()
    assert made.logit_scale.grad is not None
    assert made.logit_scale.grad != 0
