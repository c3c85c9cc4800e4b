"""The noisy gate against loops, and noise that hangs on run, layer, sample and position alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.gates import FIRST_PLACE, NoisyRouter, normal
from penstock.moe.routers import SampleKeys, SoftmaxRouter, Tokens
from tests.moe.routers.plain import Case, cases, check_token_choice, decide, dot
from tests.support.draws import draws

SAMPLES, LENGTH, EXPERTS = 6, 3, 4


def gate(place: int = 0) -> NoisyRouter:
    made = NoisyRouter(5, EXPERTS, 2, place=place)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return made


def states(samples: int = SAMPLES) -> Tensor:
    return torch.randn(SAMPLES * LENGTH, 5, generator=torch.Generator().manual_seed(2))[: samples * LENGTH]


def tokens(first: int = 0, last: int = SAMPLES, seed: int = 3) -> Tokens:
    return Tokens(samples=last - first, keys=SampleKeys(seed, torch.arange(first, last) + 100))


@draws(30)
@given(cases(), st.integers(0, 5))
def test_against_loops(case: Case, place: int) -> None:
    made = NoisyRouter(4, case.num_experts, case.top_k, place=place, **case.options)
    case.fill(made)
    x_TM, experts, keys = case.x(), range(case.num_experts), case.tokens.keys
    assert keys is not None
    shape = torch.Size((case.samples, case.length, case.num_experts))
    noise_TE = normal(shape, FIRST_PLACE + place, keys).flatten(0, 1)
    logits = [
        [
            dot(made.weight[e], x_TM[t])
            + noise_TE[t, e] * (1 + dot(made.noise_weight[e], x_TM[t]).exp()).log()
            for e in experts
        ]
        for t in range(case.count)
    ]
    check_token_choice(case, made, x_TM, decide(case, logits))
    clean = [[dot(made.weight[e], x_TM[t]) for e in experts] for t in range(case.count)]
    check_token_choice(case, made.eval(), x_TM, decide(case, clean))


@given(st.integers(1, SAMPLES - 1))
def test_the_noise_does_not_depend_on_the_cut(cut: int) -> None:
    made = gate()
    whole = made(states(), tokens())
    x_TM = states()
    parts = [
        made(x_TM[: cut * LENGTH], tokens(0, cut)),
        made(x_TM[cut * LENGTH :], tokens(cut, SAMPLES)),
    ]
    assert torch.equal(torch.cat([part.experts_Tk for part in parts]), whole.experts_Tk)
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.weights)


@pytest.mark.parametrize("other", ["seed", "place", "sample"])
def test_other_noise_for_another(other: str) -> None:
    made = gate(place=int(other == "place"))
    known = gate()(states(), tokens()).sums.z
    first = int(other == "sample")
    there = tokens(first, SAMPLES + first, seed=4 if other == "seed" else 3)
    assert made(states(), there).sums.z != known
    assert gate()(states(), tokens()).sums.z == known


def test_without_keys_it_is_pytorchs_own_noise() -> None:
    made = gate()
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(made(states(), Tokens(samples=SAMPLES)).sums.z.item())
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_noise_weight_starts_at_zero_and_learns() -> None:
    made = NoisyRouter(5, EXPERTS, 2, place=0)
    assert torch.equal(made.noise_weight, torch.zeros(EXPERTS, 5))
    made(states(), tokens()).weights[:, 0].sum().backward()
    assert made.noise_weight.grad is not None
    assert made.noise_weight.grad.norm() > 0


def test_the_spread_at_the_start_is_log_two() -> None:
    """Without any weight the logits are noise times softplus(0)."""
    made = NoisyRouter(1, 8, 1, place=0)
    ids = Tokens(samples=500, keys=SampleKeys(0, torch.arange(500)))
    logits = made.logits(torch.zeros(2000, 1), ids)
    assert logits.std().item() == pytest.approx(math.log(2), rel=0.02)  # 16000 draws: 0.6 % is one sigma
    assert abs(logits.mean().item()) < 5 * math.log(2) / 16000**0.5


def test_in_evaluation_it_is_the_softmax_gate() -> None:
    made, plain = gate().eval(), SoftmaxRouter(5, EXPERTS, 2)
    plain.weight.data = made.weight.data
    assert torch.equal(made(states(), tokens()).weights, plain(states(), tokens()).weights)
