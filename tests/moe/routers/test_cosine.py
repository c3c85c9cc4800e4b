"""The cosine gate against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe.gates import INITIAL_TEMPERATURE, CosineRouter
from penstock.moe.routers import Tokens
from tests.moe.routers.plain import Case, cases, check_token_choice, decide, dot, length
from tests.support.draws import draws


@draws(30)
@given(cases(), st.integers(2, 4))  # of one dimension, all cosines would be 1 or -1
def test_against_loops(case: Case, size: int) -> None:
    made = CosineRouter(4, case.num_experts, case.top_k, proj_size=size, **case.options)
    case.fill(made)
    x_TM = case.x()
    logits = []
    for t in range(case.count):
        projected = torch.stack([dot(made.projection[p], x_TM[t]) for p in range(size)])
        cosines = [dot(projected, e) / (length(projected) * length(e)) for e in made.weight]
        logits.append([cosine / made.log_temperature.exp() for cosine in cosines])
    check_token_choice(case, made, x_TM, decide(case, logits))


def test_the_length_of_a_hidden_state_says_nothing() -> None:
    made, x_TM = CosineRouter(8, 4, 2, proj_size=8), torch.randn(6, 8)
    near, far = (made(x_TM * factor, Tokens()) for factor in (1.0, 64.0))  # exact in binary
    assert torch.equal(near.experts_Tk, far.experts_Tk)
    torch.testing.assert_close(near.weights, far.weights)


def test_the_temperature_starts_as_told_and_is_learnt() -> None:
    made = CosineRouter(8, 4, 2, proj_size=3)
    assert made.log_temperature.dim() == 0  # so initial weights and weight decay leave it alone
    assert made.log_temperature.exp().item() == pytest.approx(INITIAL_TEMPERATURE)
    before = made(torch.ones(1, 8), Tokens()).sums.z
    before.backward()
    assert made.log_temperature.grad is not None
    assert made.log_temperature.grad != 0
    with torch.no_grad():
        made.log_temperature.fill_(math.log(0.5))
    assert made(torch.ones(1, 8), Tokens()).sums.z != before


def test_a_zero_vector_has_a_finite_gradient() -> None:
    made, x_TM = CosineRouter(8, 4, 2, proj_size=3), torch.zeros(2, 8, requires_grad=True)
    made(x_TM, Tokens()).weights[:, 0].sum().backward()
    assert x_TM.grad is not None
    assert x_TM.grad.abs().max() < 1e5
