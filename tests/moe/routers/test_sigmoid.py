"""The sigmoid gate against loops."""

from __future__ import annotations

import torch
from hypothesis import given

from penstock.moe.gates import SigmoidRouter
from penstock.moe.routers import Tokens
from tests.moe.routers.plain import Case, Row, cases, check_token_choice, decide, dot
from tests.support.draws import draws


def sigmoids(row: Row) -> Row:
    return [1 / (1 + (-value).exp()) for value in row]


@draws(30)
@given(cases())
def test_against_loops(case: Case) -> None:
    made = SigmoidRouter(4, case.num_experts, case.top_k, **case.options)
    case.fill(made)
    x_TM = case.x()
    logits = [[dot(made.weight[e], x_TM[t]) for e in range(case.num_experts)] for t in range(case.count)]
    check_token_choice(case, made, x_TM, decide(case, logits, scores=sigmoids))


def test_logits_so_negative_that_all_scores_are_zero() -> None:
    made = SigmoidRouter(1, 3, 2)
    with torch.no_grad():
        made.weight.fill_(-1.0)
    choice = made(torch.full((2, 1), 200.0), Tokens())
    assert torch.equal(choice.weights, torch.zeros(2, 2))
    assert torch.equal(choice.sums.probability_BE, torch.zeros(1, 3))
    ((choice.weights.sum() + choice.sums.probability_BE.sum()) * 65536).backward()  # as a loss is scaled
    assert made.weight.grad is not None
    assert made.weight.grad.isfinite().all()
