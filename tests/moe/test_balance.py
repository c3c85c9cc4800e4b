"""Balance losses against their formula, E * sum_e f_e * P_e, and against autograd."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.config import BalanceGroup
from penstock.moe.routers import BALANCES, Balance
from tests.support.draws import draws

EXPERTS, CHOICES, LAYERS = 4, 2, 2
GROUPS: tuple[BalanceGroup, ...] = ("global", "microbatch", "sequence")


@dataclass(frozen=True)
class Split:
    """Tokens of every sample that are not padding, and samples of every microbatch."""

    lengths: list[int]
    cut: list[int]

    @property
    def tokens(self) -> Tensor:
        return torch.tensor(float(sum(self.lengths)), dtype=torch.float64)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Of microbatches, in samples."""
        edges = [sum(self.cut[:i]) for i in range(len(self.cut) + 1)]
        return list(pairwise(edges))


@st.composite
def splits(draw: st.DrawFn) -> Split:
    cut = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    return Split(draw(st.lists(st.integers(0, 5), min_size=sum(cut), max_size=sum(cut)).filter(any)), cut)


def gate(split: Split, layer: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of every sample the chosen experts [L, k] and probabilities [L, E], uneven over experts and samples."""
    generator = torch.Generator().manual_seed(layer)
    experts, probabilities = [], []
    for sample, length in enumerate(split.lengths):
        logits = torch.randn(length, EXPERTS, generator=generator, dtype=torch.float64)
        probability_LE = (logits + sample * torch.arange(EXPERTS) / 4).softmax(-1)
        probabilities.append(probability_LE)
        experts.append(probability_LE.topk(CHOICES).indices)
    return experts, probabilities


def sums(split: Split) -> tuple[Tensor, Tensor]:
    """chosen_YBE and probability_YBE over all samples."""
    gates = [gate(split, layer) for layer in range(LAYERS)]
    chosen = [torch.stack([counts(experts) for experts in made]) for made, _ in gates]
    probability = [torch.stack([p.sum(0) for p in made]) for _, made in gates]
    return torch.stack(chosen), torch.stack(probability)


def counts(experts: Tensor) -> Tensor:
    return torch.bincount(experts.flatten(), minlength=EXPERTS)


def loss_of(balance: Balance, split: Split, chosen_YBE: Tensor, probability_YBE: Tensor) -> Tensor:
    """The loss as a step makes it: a piece per layer and microbatch, sums over all, the total."""
    pieces = [
        balance.piece(chosen_YBE[y, first:last], probability_YBE[y, first:last])
        for y in range(len(chosen_YBE))
        for first, last in split.bounds
    ]
    everything = (chosen_YBE.sum(1).double(), probability_YBE.sum(1))
    pieces_Y = torch.stack(pieces).view(len(chosen_YBE), -1).sum(1)
    return balance.by_layer(pieces_Y, *everything, split.tokens).sum()


def formula(experts: list[Tensor], probabilities: list[Tensor]) -> float:
    """E * sum_e f_e * P_e over one group of tokens, times the number of its tokens."""
    chosen, probability = torch.cat(experts).flatten().tolist(), torch.cat(probabilities)
    value = 0.0
    for e in range(EXPERTS):
        share = chosen.count(e) / max(1, len(chosen))
        value += EXPERTS * share * sum(probability[:, e].tolist())
    return value


def parts_of(group: BalanceGroup, split: Split) -> list[tuple[int, int]]:
    """The samples that are judged together."""
    if group == "microbatch":
        return split.bounds
    count = len(split.lengths)
    return [(0, count)] if group == "global" else [(i, i + 1) for i in range(count)]


@pytest.mark.parametrize("group", GROUPS)
@draws(40)
@given(split=splits())
def test_the_token_weighted_mean_of_the_formula(group: BalanceGroup, split: Split) -> None:
    expected = 0.0
    for experts, probabilities in (gate(split, layer) for layer in range(LAYERS)):
        for first, last in parts_of(group, split):
            expected += formula(experts[first:last], probabilities[first:last]) / sum(split.lengths)
    assert float(loss_of(BALANCES[group], split, *sums(split))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("group", GROUPS)
@draws(40)
@given(split=splits())
def test_slope_is_the_derivative_of_the_total(group: BalanceGroup, split: Split) -> None:
    balance = BALANCES[group]
    chosen_YBE, probability_YBE = sums(split)
    probability_YBE.requires_grad_()
    loss_of(balance, split, chosen_YBE, probability_YBE).backward()
    assert probability_YBE.grad is not None
    for y in range(LAYERS):
        for first, last in split.bounds:
            slope_BE = balance.slope(chosen_YBE[y, first:last], chosen_YBE.sum(1), y, split.tokens)
            assert slope_BE.shape == (last - first, EXPERTS)
            torch.testing.assert_close(slope_BE, probability_YBE.grad[y, first:last])


@pytest.mark.parametrize("group", GROUPS)
def test_no_choices_at_all_is_zero_and_not_nan(group: BalanceGroup) -> None:
    nothing = torch.zeros(1, 1, EXPERTS)
    assert float(loss_of(BALANCES[group], Split([1], [1]), nothing.long(), nothing.double())) == 0.0
