"""Order and un-order: equal to a loop, and each the transpose of the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.gather import RowPlan, from_rows, take_rows, to_rows
from penstock.moe.order import build_order
from tests.moe.test_order import Choices, choices

HIDDEN = 3


def plans(*, padded: bool) -> st.SearchStrategy[RowPlan]:
    def plan(made: Choices, chunks: int) -> RowPlan:
        return build_order(made.config).plan(made.experts_Tk, chunks).rows

    return st.builds(plan, choices(capacity=padded), st.integers(1, 5))


any_plan = plans(padded=False) | plans(padded=True)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def sizes(plan: RowPlan) -> tuple[int, int, int]:
    """Tokens, choices, rows."""
    tokens, k = plan.row_of_choice_Tk.shape
    return tokens, k, len(plan.token_of_row_R)


@given(any_plan)
def test_to_rows_equals_a_loop(plan: RowPlan) -> None:
    tokens, _, rows = sizes(plan)
    x_TM = numbers(tokens, HIDDEN)
    expected = torch.zeros(rows, HIDDEN, dtype=torch.float64)
    for row, token in enumerate(plan.token_of_row_R.tolist()):
        if token >= 0:
            expected[row] = x_TM[token].detach()
    assert torch.equal(to_rows(x_TM, plan), expected)


@given(any_plan)
def test_from_rows_equals_a_loop(plan: RowPlan) -> None:
    tokens, k, rows = sizes(plan)
    rows_RM, weights_Tk = numbers(rows, HIDDEN), numbers(tokens, k, seed=1)
    expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for token in range(tokens):
        for choice, row in enumerate(plan.row_of_choice_Tk[token].tolist()):
            if row >= 0:
                expected[token] += weights_Tk[token, choice].detach() * rows_RM[row].detach()
    torch.testing.assert_close(from_rows(rows_RM, weights_Tk, plan), expected)


@given(any_plan)
def test_each_is_the_transpose_of_the_other(plan: RowPlan) -> None:
    """<to_rows(x), r> = <x, from_rows(r, 1)>, and each gradient is the other function."""
    tokens, k, rows = sizes(plan)
    x_TM, r_RM = numbers(tokens, HIDDEN), numbers(rows, HIDDEN, seed=1)
    ones_Tk = torch.ones(tokens, k, dtype=torch.float64)
    down, up = to_rows(x_TM, plan), from_rows(r_RM, ones_Tk, plan)
    torch.testing.assert_close((down * r_RM).sum(), (x_TM * up).sum())
    (grad_x,) = torch.autograd.grad(down, x_TM, r_RM.detach())
    torch.testing.assert_close(grad_x, up.detach())
    (grad_r,) = torch.autograd.grad(up, r_RM, x_TM.detach())
    torch.testing.assert_close(grad_r, down.detach())


@settings(max_examples=25)
@given(any_plan)
def test_gradients(plan: RowPlan) -> None:
    tokens, k, rows = sizes(plan)
    assert torch.autograd.gradcheck(lambda x: to_rows(x, plan), numbers(tokens, HIDDEN))
    assert torch.autograd.gradcheck(
        lambda r, w: from_rows(r, w, plan), (numbers(rows, HIDDEN, seed=1), numbers(tokens, k, seed=2))
    )


def test_weights_keep_their_precision() -> None:
    """bfloat16 rows with float32 weights: the sum is bfloat16, the weights' gradient float32."""
    plan = RowPlan(torch.arange(2), torch.arange(2), torch.arange(2).view(2, 1), padded=False)
    rows_RM = numbers(2, HIDDEN).detach().bfloat16().requires_grad_()
    weights_Tk = torch.ones(2, 1, requires_grad=True)
    out_TM = from_rows(rows_RM, weights_Tk, plan)
    assert out_TM.dtype == torch.bfloat16
    grad_rows, grad_weights = torch.autograd.grad(out_TM.sum(), (rows_RM, weights_Tk))
    assert grad_rows.dtype == torch.bfloat16
    assert grad_weights.dtype == torch.float32


@pytest.mark.parametrize("width", [(), (2,)])
def test_nothing_to_take_from_gives_zeros(width: tuple[int, ...]) -> None:
    """A rank whose rows are all padding: the source is empty."""
    taken = take_rows(torch.ones(0, *width), torch.tensor([-1, -1]), padded=True)
    assert torch.equal(taken, torch.zeros(2, *width))
