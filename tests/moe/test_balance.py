"""Balance losses against their formula, E * sum_e f_e * P_e, and against autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.balance import Balance, build_balance
from penstock.moe.config import BalanceGroup

EXPERTS, CHOICES = 4, 2
GROUPS: tuple[BalanceGroup, ...] = ("global", "microbatch")
cuts = st.lists(st.integers(1, 7), min_size=1, max_size=5)
"""Tokens per microbatch."""


def gate(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Chosen experts [T, k] and probabilities [T, E] of one layer, uneven over experts and tokens."""
    generator = torch.Generator().manual_seed(seed)
    drift = torch.arange(tokens).unsqueeze(1) / tokens * torch.arange(EXPERTS)
    logits = torch.randn(tokens, EXPERTS, generator=generator, dtype=torch.float64) + drift
    probability_TE = logits.softmax(-1)
    return probability_TE.topk(CHOICES).indices, probability_TE


def counts(experts: Tensor) -> Tensor:
    return torch.bincount(experts.flatten(), minlength=EXPERTS)


def loss_of(balance: Balance, chosen_YPE: Tensor, probability_YPE: Tensor, tokens: int) -> Tensor:
    """The loss as a step makes it: pieces, sums, total."""
    pairs = zip(chosen_YPE.flatten(0, 1), probability_YPE.flatten(0, 1), strict=True)
    pieces = torch.stack([balance.piece(chosen, probability) for chosen, probability in pairs]).sum()
    sums = (chosen_YPE.sum(1).double(), probability_YPE.sum(1))
    return balance.total(pieces, *sums, torch.tensor(float(tokens), dtype=torch.float64))


def layers(cut: list[int], count: int = 2) -> tuple[Tensor, Tensor]:
    """chosen_YPE and probability_YPE of `count` layers whose tokens are cut into microbatches."""
    made = [gate(sum(cut), seed) for seed in range(count)]
    chosen = [torch.stack([counts(part) for part in experts.split(cut)]) for experts, _ in made]
    probability = [torch.stack([part.sum(0) for part in p.split(cut)]) for _, p in made]
    return torch.stack(chosen), torch.stack(probability)


def formula(experts_Tk: Tensor, probability_TE: Tensor) -> float:
    """E * sum_e f_e * P_e over one group of tokens."""
    share_E = counts(experts_Tk) / experts_Tk.numel()
    return EXPERTS * float((share_E * probability_TE.mean(0)).sum())


@given(cuts)
def test_global_is_the_formula_over_all_tokens(cut: list[int]) -> None:
    expected = sum(formula(*gate(sum(cut), seed)) for seed in range(2))
    assert float(loss_of(build_balance("global"), *layers(cut), sum(cut))) == pytest.approx(expected)


@given(cuts)
def test_microbatch_is_the_token_weighted_mean_of_the_formula(cut: list[int]) -> None:
    expected = 0.0
    for seed in range(2):
        experts_Tk, probability_TE = gate(sum(cut), seed)
        for experts, probability in zip(experts_Tk.split(cut), probability_TE.split(cut), strict=True):
            expected += formula(experts, probability) * len(experts) / sum(cut)
    assert float(loss_of(build_balance("microbatch"), *layers(cut), sum(cut))) == pytest.approx(expected)


@pytest.mark.parametrize("group", GROUPS)
@given(cut=cuts)
def test_slope_is_the_derivative_of_the_total(group: BalanceGroup, cut: list[int]) -> None:
    balance = build_balance(group)
    chosen_YPE, probability_YPE = layers(cut)
    probability_YPE.requires_grad_()
    loss_of(balance, chosen_YPE, probability_YPE, sum(cut)).backward()
    assert probability_YPE.grad is not None
    for y in range(len(chosen_YPE)):
        for p in range(len(cut)):
            tokens = torch.tensor(float(sum(cut)), dtype=torch.float64)
            slope_E = balance.slope(chosen_YPE[y, p], chosen_YPE[y].sum(0), tokens)
            torch.testing.assert_close(slope_E, probability_YPE.grad[y, p])


def test_only_global_does_not_depend_on_the_cut() -> None:
    whole, cut = [12], [3, 1, 8]
    exact = [float(loss_of(build_balance("global"), *layers(c), 12)) for c in (whole, cut)]
    assert exact[0] == pytest.approx(exact[1], rel=1e-12)
    judged_alone = [float(loss_of(build_balance("microbatch"), *layers(c), 12)) for c in (whole, cut)]
    assert judged_alone[0] == pytest.approx(exact[0], rel=1e-12)  # one piece is the whole batch
    assert abs(judged_alone[1] - judged_alone[0]) > 1e-3


@pytest.mark.parametrize("group", GROUPS)
def test_even_routing_costs_one_per_layer(group: BalanceGroup) -> None:
    """Shares of 1 / E each: the least value, whatever the number of experts."""
    chosen, probability = torch.full((3, 1, EXPERTS), 6), torch.full((3, 1, EXPERTS), 3.0).double()
    assert float(loss_of(build_balance(group), chosen, probability, 12)) == pytest.approx(3.0)


@pytest.mark.parametrize("group", GROUPS)
def test_built_by_its_name(group: BalanceGroup) -> None:
    assert build_balance(group).group == group


@pytest.mark.parametrize("group", GROUPS)
def test_no_choices_at_all_is_zero_and_not_nan(group: BalanceGroup) -> None:
    nothing = torch.zeros(1, 1, EXPERTS)
    assert float(loss_of(build_balance(group), nothing.long(), nothing.double(), 1)) == 0.0
