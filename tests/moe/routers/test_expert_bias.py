"""Balance by bias: what it steers, what it counts, how it moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.moe.gates import SigmoidRouter
from penstock.moe.routers import ExpertBias, ExpertGroups, Tokens
from tests.moe.routers.plain import Case, best, cases, check_token_choice, decide, dot

EXPERTS = 4


def gate(rate: float = 0.1) -> tuple[SigmoidRouter, ExpertBias]:
    bias = ExpertBias(EXPERTS, rate)
    made = SigmoidRouter(3, EXPERTS, 2, bias=bias)
    with torch.no_grad():
        made.weight.copy_(torch.randn(EXPERTS, 3, generator=torch.Generator().manual_seed(1)))
    return made, bias


def states(seed: int = 2) -> Tensor:
    return torch.randn(10, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()


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


def test_a_backward_counts_once_and_steps_add_up() -> None:
    made, bias = gate()
    expected = torch.zeros(EXPERTS, dtype=torch.int64)
    for seed in (2, 3, 4):  # gradient accumulation
        trained_loss(made, states(seed)).backward()
        expected += torch.bincount(made(states(seed), Tokens()).experts_Tk.flatten(), minlength=EXPERTS)
        assert torch.equal(bias.counted_E, expected)


def test_a_graph_that_is_kept_counts_once() -> None:
    made, bias = gate()
    loss = trained_loss(made, states())
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(bias.counted_E, made(states(), Tokens()).sums.chosen_E)


def test_a_forward_alone_counts_nothing() -> None:
    made, bias = gate()
    trained_loss(made, states())
    with torch.no_grad():
        trained_loss(made, states())
    assert not bias.counted_E.any()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_counts_once(use_reentrant: bool) -> None:
    made, bias = gate()
    runs = 0

    def run(x_TM: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return trained_loss(made, x_TM)

    loss = checkpoint(run, states(), use_reentrant=use_reentrant)
    assert not bias.counted_E.any()
    loss.backward()
    assert runs == 2
    assert torch.equal(bias.counted_E, made(states(), Tokens()).sums.chosen_E)


def test_counting_leaves_value_and_gradient_alone() -> None:
    made, _ = gate()
    x_TM, y_TM = states(), states()
    trained_loss(made, x_TM).backward()
    made(y_TM, Tokens()).weights.square().sum().backward()
    assert x_TM.grad is not None
    assert y_TM.grad is not None
    assert torch.equal(x_TM.grad, y_TM.grad)


@given(st.lists(st.integers(0, 9), min_size=EXPERTS, max_size=EXPERTS), st.sampled_from([0.5, 0.125]))
def test_an_update_moves_by_rate_times_sign(counts: list[int], rate: float) -> None:
    bias = ExpertBias(EXPERTS, rate)
    bias.value_E.fill_(1.0)
    bias.count(torch.tensor(counts))
    bias.update()
    even = sum(counts) / EXPERTS
    assert bias.value_E.tolist() == [1.0 + rate * ((c < even) - (c > even)) for c in counts]
    assert not bias.counted_E.any()


def test_an_update_judges_the_sum_over_ranks() -> None:
    bias = ExpertBias(2, 0.5)
    bias.count(torch.tensor([3, 1]))
    bias.update(lambda counted_E: counted_E + torch.tensor([0.0, 10.0]))
    assert bias.value_E.tolist() == [0.5, -0.5]


def test_steps_bring_crowded_experts_to_balance() -> None:
    made, bias = gate(rate=0.01)
    with torch.no_grad():
        made.weight.mul_(0.2)
    x_TM = torch.randn(400, 3, generator=torch.Generator().manual_seed(0)) + 3.0
    before = made(x_TM, Tokens()).sums.chosen_E
    for _ in range(100):
        bias.count(made(x_TM, Tokens()).sums.chosen_E)
        bias.update()
    after = made(x_TM, Tokens()).sums.chosen_E
    assert before.max() > 1.5 * 200
    assert after.max() < 1.2 * 200  # 400 tokens, 2 choices, 4 experts


def test_casting_a_model_costs_no_precision() -> None:
    bias = torch.nn.Sequential(ExpertBias(2, 0.001)).to(torch.bfloat16)[0]
    assert isinstance(bias, ExpertBias)
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
