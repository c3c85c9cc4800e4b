"""The sort permutation's rows against sorted()."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe.permute.sort import SortPermutation
from penstock.moe.routers import TokenChoice
from penstock.routing.sizes import split_sizes
from tests.moe.permute.support import NO_SUMS, chunk_counts, numbers, token_choices

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


@given(token_choices(EXPERTS), st.integers(0, 99))
def test_padding_leaves_no_trace(choice: TokenChoice, seed: int) -> None:
    """With padding tokens taken out beforehand, the rows are the same."""
    order, x_TM = SortPermutation(EXPERTS), numbers(len(choice.experts_Tk), 3, seed=seed)
    there_T = choice.experts_Tk[:, 0] >= 0
    short = TokenChoice(choice.experts_Tk[there_T], choice.weights[there_T], NO_SUMS)
    rows = order.permute(x_TM, choice, order.plan(choice, 1))
    assert torch.equal(rows, order.permute(x_TM[there_T], short, order.plan(short, 1)))


def test_more_chunks_than_tokens_leave_empty_ones() -> None:
    choice = TokenChoice(torch.tensor([[0, 1], [2, 1], [0, 2]]), numbers(3, 2), NO_SUMS)
    assert SortPermutation(3).plan(choice, 6).chunk_rows == (2, 2, 2, 0, 0, 0)


def test_sizes_depend_on_data() -> None:
    assert SortPermutation.dynamic
    assert not SortPermutation.row_counts
