"""The sort permutation's rows against sorted(), and rows by index in half precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe.permute.slots import IndexPermutation
from penstock.moe.permute.sort import RowPlan, SortPermutation, take_rows
from penstock.moe.routers import Choice, TokenChoice
from penstock.routing.sizes import split_sizes
from tests.moe.permute.support import HIDDEN, chunk_counts, expert_choices, numbers, token_choices, tokens_of

EXPERTS = 4


@given(token_choices(EXPERTS), chunk_counts)
def test_sorted_by_chunk_then_expert_then_token(choice: TokenChoice, chunks: int) -> None:
    plan = SortPermutation(EXPERTS).plan(choice, chunks)
    tokens, k = choice.experts_Tk.shape
    chunk_of_token = [c for c, size in enumerate(split_sizes(tokens, chunks)) for _ in range(size)]
    wanted = sorted(
        (chunk_of_token[token], int(expert), token, token * k + j)
        for token, row in enumerate(choice.experts_Tk)
        for j, expert in enumerate(row)
        if expert >= 0
    )
    assert plan.rows.token_of_row_R.tolist() == [token for *_, token, _ in wanted]
    assert plan.rows.weight_of_row_R.tolist() == [place for *_, place in wanted]
    counts = [[sum(w[:2] == (c, e) for w in wanted) for e in range(EXPERTS)] for c in range(chunks)]
    assert plan.counts_CN is not None
    assert plan.counts_CN.tolist() == counts
    assert plan.chunk_rows == tuple(sum(row) for row in counts)
    assert (plan.tokens, plan.slots) == (tokens, None)


@given(token_choices(EXPERTS) | expert_choices(EXPERTS), st.integers(1, 5), st.booleans())
def test_a_gradient_may_be_one_number_expanded(choice: Choice, chunks: int, by_slot: bool) -> None:
    sorts = isinstance(choice, TokenChoice) and not by_slot
    order = SortPermutation(EXPERTS) if sorts else IndexPermutation(EXPERTS, min_capacity=1)
    plan: RowPlan = order.plan(choice, chunks).rows
    inputs = (numbers(len(plan.token_of_row_R), HIDDEN), numbers(*plan.row_of_weight.shape, seed=1))
    out_TM = plan.give(*inputs)
    ones = torch.ones(1, 1, dtype=torch.float64).expand(tokens_of(choice), HIDDEN)
    expanded = torch.autograd.grad(out_TM, inputs, ones, retain_graph=True)
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
