"""Permuting and unpermuting by index: equal to a loop, and each the transpose of the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe.permute.slots import IndexPermutation
from penstock.moe.permute.sort import RowPlan, SortPermutation, take_rows
from tests.moe.permute.support import HIDDEN, expert_choices, numbers, token_choices
from tests.support.draws import draws

EXPERTS = 4


@st.composite
def plans(draw: st.DrawFn) -> RowPlan:
    order = draw(st.sampled_from([SortPermutation(EXPERTS), IndexPermutation(EXPERTS, min_capacity=1)]))
    kinds = (
        token_choices(EXPERTS) | expert_choices(EXPERTS)
        if "expert" in order.kinds
        else token_choices(EXPERTS)
    )
    rows: RowPlan = order.plan(draw(kinds), draw(st.integers(1, 5))).rows
    return rows


def sizes(plan: RowPlan) -> tuple[int, int, torch.Size]:
    """Tokens, rows, shape of the weights."""
    tokens = len(plan.to_tokens.starts_B) - plan.to_tokens.spare
    return tokens, len(plan.token_of_row_R), plan.row_of_weight.shape


@given(plans())
def test_the_maps_are_inverse(plan: RowPlan) -> None:
    _, rows, _ = sizes(plan)
    inverse = [-1] * rows
    for weight, row in enumerate(plan.row_of_weight.flatten().tolist()):
        if row >= 0:
            assert inverse[row] == -1, "two weights for one row"
            inverse[row] = weight
    assert plan.weight_of_row_R.tolist() == inverse
    assert ((plan.token_of_row_R < 0) == (plan.weight_of_row_R < 0)).all()
    assert plan.padded or -1 not in inverse


@given(plans())
def test_take_equals_a_loop(plan: RowPlan) -> None:
    tokens, rows, _ = sizes(plan)
    x_TM = numbers(tokens, HIDDEN)
    expected = torch.zeros(rows, HIDDEN, dtype=torch.float64)
    for row, token in enumerate(plan.token_of_row_R.tolist()):
        if token >= 0:
            expected[row] = x_TM[token].detach()
    assert torch.equal(plan.take(x_TM), expected)


@given(plans(), st.booleans())
def test_give_equals_a_loop(plan: RowPlan, weighted: bool) -> None:
    tokens, rows, shape = sizes(plan)
    rows_RM, weights = numbers(rows, HIDDEN), numbers(*shape, seed=1)
    expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for row, token in enumerate(plan.token_of_row_R.tolist()):
        if token >= 0:
            weight = weights.flatten()[plan.weight_of_row_R[row]].detach() if weighted else 1.0
            expected[token] += weight * rows_RM[row].detach()
    torch.testing.assert_close(plan.give(rows_RM, weights if weighted else None), expected)


@given(plans())
def test_each_is_the_transpose_of_the_other(plan: RowPlan) -> None:
    """<take(x), r> = <x, give(r)>, and each gradient is the other function."""
    tokens, rows, _ = sizes(plan)
    x_TM, r_RM = numbers(tokens, HIDDEN), numbers(rows, HIDDEN, seed=1)
    down, up = plan.take(x_TM), plan.give(r_RM, None)
    torch.testing.assert_close((down * r_RM).sum(), (x_TM * up).sum())
    (grad_x,) = torch.autograd.grad(down, x_TM, r_RM.detach())
    assert torch.equal(grad_x, up.detach())
    (grad_r,) = torch.autograd.grad(up, r_RM, x_TM.detach())
    assert torch.equal(grad_r, down.detach())


@draws(25)
@given(plans())
def test_gradients(plan: RowPlan) -> None:
    tokens, rows, shape = sizes(plan)
    assert torch.autograd.gradcheck(plan.take, numbers(tokens, HIDDEN))
    assert torch.autograd.gradcheck(plan.give, (numbers(rows, HIDDEN, seed=1), numbers(*shape, seed=2)))
    assert torch.autograd.gradcheck(lambda r: plan.give(r, None), numbers(rows, HIDDEN, seed=1))


@given(plans())
def test_a_gradient_may_be_one_number_expanded(plan: RowPlan) -> None:
    tokens, rows, shape = sizes(plan)
    inputs = (numbers(rows, HIDDEN), numbers(*shape, seed=1))
    out_TM = plan.give(*inputs)
    ones = torch.ones(1, 1, dtype=torch.float64)
    expanded = torch.autograd.grad(out_TM, inputs, ones.expand(tokens, HIDDEN), retain_graph=True)
    assert all(map(torch.equal, expanded, torch.autograd.grad(out_TM, inputs, torch.ones_like(out_TM))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """The sum is rounded to the rows' precision once, the weights' gradient stays in the weights'."""
    row_Tk = torch.tensor([[3, 0], [1, 4], [5, 2]])
    plan = RowPlan.make(row_Tk, torch.arange(6) // 2, 3, 6, padded=False)
    rows_RM = numbers(6, 40).detach().to(dtype).requires_grad_()
    weights_Tk = numbers(3, 2, seed=1).detach().to(dtype).float().requires_grad_()
    out_TM = plan.give(rows_RM, weights_Tk)
    towards = numbers(3, 40, seed=2).detach().to(dtype)
    grads = torch.autograd.grad(out_TM, (rows_RM, weights_Tk), towards)
    assert [t.dtype for t in (out_TM, *grads)] == [dtype, dtype, torch.float32]
    exact_RM, exact_Tk = (t.detach().double().requires_grad_() for t in (rows_RM, weights_Tk))
    exact_TM = plan.give(exact_RM, exact_Tk)
    exact = (exact_TM, *torch.autograd.grad(exact_TM, (exact_RM, exact_Tk), towards.double()))
    for made, right in zip((out_TM, *grads), exact, strict=True):
        assert (made.double() - right).norm() <= torch.finfo(dtype).eps * right.norm()


@pytest.mark.parametrize("width", [(), (2,)])
def test_nothing_to_take_from_gives_zeros(width: tuple[int, ...]) -> None:
    """A rank whose rows are all padding: the source is empty."""
    taken = take_rows(torch.ones(0, *width), torch.tensor([-1, -1]), padded=True)
    assert torch.equal(taken, torch.zeros(2, *width))
