"""The softmax gate against loops, and float32 whatever comes in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from penstock.moe.routers import SoftmaxRouter, Tokens
from tests.moe.routers.plain import Case, cases, check_token_choice, decide, dot
from tests.support.draws import draws

HIDDEN, TOKENS, EXPERTS = 6, 20, 5


def gate(dtype: torch.dtype = torch.float32, top_k: int = 2, *, renormalise: bool = True) -> SoftmaxRouter:
    made = SoftmaxRouter(HIDDEN, EXPERTS, top_k, renormalise=renormalise).to(dtype)
    with torch.no_grad():
        made.weight.copy_(torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(1)))
    return made


def states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


@draws(30)
@given(cases())
def test_against_loops(case: Case) -> None:
    made = SoftmaxRouter(4, case.num_experts, case.top_k, **case.options)
    case.fill(made)
    x_TM = case.x()
    logits = [[dot(made.weight[e], x_TM[t]) for e in range(case.num_experts)] for t in range(case.count)]
    check_token_choice(case, made, x_TM, decide(case, logits))


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_rounded_arithmetic_would_decide_differently(gate_dtype: torch.dtype, autocast: bool) -> None:
    """The weights are those of float32 arithmetic on rounded inputs, which bfloat16 arithmetic misses."""
    made, x_TM = gate(gate_dtype), states(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        weights = made(x_TM, Tokens()).weights
    logits = x_TM.float() @ made.weight.float().t()
    best = logits.softmax(-1).topk(2).values
    torch.testing.assert_close(weights, best / best.sum(-1, keepdim=True), rtol=1e-6, atol=0.0)
    rounded = (x_TM @ made.weight.bfloat16().t()).softmax(-1).topk(2).values.float()
    assert not torch.allclose(rounded / rounded.sum(-1, keepdim=True), weights, rtol=1e-4)


def test_weights_sum_to_one_only_if_renormalised() -> None:
    torch.testing.assert_close(gate()(states(), Tokens()).weights.sum(-1), torch.ones(TOKENS))
    assert (gate(renormalise=False)(states(), Tokens()).weights.sum(-1) < 1).all()


@pytest.mark.parametrize("what", ["weights", "probability_BE", "z"])
def test_the_gate_learns_from_every_output(what: str) -> None:
    made = gate()
    choice = made(states(), Tokens())
    value: Tensor = choice.weights if what == "weights" else getattr(choice.sums, what)
    (value * torch.arange(1, value.numel() + 1).view_as(value)).sum().backward()
    assert made.weight.grad is not None
    assert made.weight.grad.norm() > 0
