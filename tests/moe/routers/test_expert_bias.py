"""Balance by bias: what it steers, what it counts, how it moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.gates import SigmoidRouter
from penstock.moe.routers import ExpertBias, ExpertGroups, Tokens
from tests.moe.routers.plain import Case, best, cases, check_token_choice, decide, dot

EXPERTS = 4


def gate() -> tuple[SigmoidRouter, ExpertBias]:
    bias = ExpertBias(EXPERTS, 0.1)
    made = SigmoidRouter(3, EXPERTS, 2, bias=bias)
    with torch.no_grad():
        made.weight.copy_(torch.randn(EXPERTS, 3, generator=torch.Generator().manual_seed(1)))
    return made, bias


def states() -> Tensor:
    return torch.randn(10, 3, generator=torch.Generator().manual_seed(2)).requires_grad_()


def trained_loss(made: SigmoidRouter, x_TM: Tensor) -> Tensor:
    assert made.bias is not None
    choice = made(x_TM, Tokens())
    return made.bias.when_trained(choice.weights, choice.sums.chosen_E).square().sum()


@given(cases())
def test_selection_uses_the_bias_and_weights_do_not(case: Case) -> None:
    bias = ExpertBias(case.num_experts, 0.1)
    made = SigmoidRouter(4, case.num_experts, case.top_k, bias=bias, **case.options)
    case.fill(made)
    bias.value_E.copy_(torch.linspace(2.0, -1.0, case.num_experts))  # outweighs most scores
    x_TM, values = case.x(), bias.value_E.tolist()
    logits = [[dot(weight, x_TM[t]) for weight in made.weight] for t in range(case.count)]
    expected = decide(
        case,
        logits,
        scores=lambda row: [value.sigmoid() for value in row],
        select=lambda row: best([s + b for s, b in zip(row, values, strict=True)], case.top_k),
    )
    check_token_choice(case, made, x_TM, expected)


def test_groups_are_judged_with_the_bias() -> None:
    bias = ExpertBias(EXPERTS, 0.1)
    made = SigmoidRouter(3, EXPERTS, 2, bias=bias, groups=ExpertGroups(groups=2, limit_to=1))
    bias.value_E.copy_(torch.tensor([0.0, 0.0, 5.0, 5.0]))
    assert (made(states(), Tokens()).experts_Tk >= 2).all()


def test_a_graph_that_is_kept_counts_once() -> None:
    made, bias = gate()
    loss = trained_loss(made, states())
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(bias.counted_E, made(states(), Tokens()).sums.chosen_E)


@given(st.lists(st.integers(0, 9), min_size=EXPERTS, max_size=EXPERTS), st.sampled_from([0.5, 0.125]))
def test_an_update_moves_by_rate_times_sign(counts: list[int], rate: float) -> None:
    bias = ExpertBias(EXPERTS, rate)
    bias.value_E.fill_(1.0)
    bias.count(torch.tensor(counts))
    bias.update()
    even = sum(counts) / EXPERTS
    assert bias.value_E.tolist() == [1.0 + rate * ((c < even) - (c > even)) for c in counts]
    assert not bias.counted_E.any()


def test_casting_a_model_costs_no_precision() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        learnt = ExpertBias(2, 0.001)
    finally:
        torch.set_default_dtype(torch.float32)
    learnt.value_E.fill_(0.501)
    bias = torch.nn.Sequential(learnt).to(torch.bfloat16).half().type(torch.bfloat16)[0]
    assert isinstance(bias, ExpertBias)
    assert torch.equal(bias.value_E, torch.full((2,), 0.501))
    bias.value_E.zero_()
    for _ in range(1000):
        bias.count(torch.tensor([1000, 1]))
        bias.update()
    assert bias.value_E.tolist() == pytest.approx([-1.0, 1.0], rel=1e-4)
    bias.count(torch.tensor([1000, 1]))
    bias.count(torch.tensor([1, 0]))
    assert bias.counted_E.tolist() == [1001, 1]


def test_bias_and_counts_are_part_of_the_state() -> None:
    bias = gate()[1]
    bias.count(torch.tensor([1, 2, 3, 4]))
    bias.value_E.fill_(0.25)
    again = ExpertBias(EXPERTS, 0.1)
    again.load_state_dict(bias.state_dict())
    assert torch.equal(again.value_E, bias.value_E)
    assert torch.equal(again.counted_E, bias.counted_E)
