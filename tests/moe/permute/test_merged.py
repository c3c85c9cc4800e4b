"""One copy per rank: which rows there are and what travels in them. Results: see test_orders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe.permute.merged import MOST_EXPERTS_THERE, MergedPermutation
from penstock.moe.products import grouped_product
from penstock.moe.routers import TokenChoice
from penstock.routing.routes import ChunkRoute
from penstock.routing.sizes import split_sizes
from tests.moe.permute.support import (
    HIDDEN,
    NO_SUMS,
    Scaling,
    chunk_counts,
    numbers,
    run_ranks,
    token_choices,
)

LOCAL = 3


@given(st.integers(1, 3), st.data(), chunk_counts)
def test_one_row_per_token_and_rank(ranks: int, data: st.DataObject, chunks: int) -> None:
    """Sorted by chunk, rank, token; it says which local experts are meant, and with what weights."""
    choice: TokenChoice = data.draw(token_choices(ranks * LOCAL))
    order = MergedPermutation(ranks * LOCAL, choice.experts_Tk.shape[1], ranks)
    x_TM = numbers(len(choice.experts_Tk), HIDDEN)
    plan = order.plan(choice, chunks)
    sizes = split_sizes(len(x_TM), chunks)
    chunk_of_token = [c for c, size in enumerate(sizes) for _ in range(size)]
    experts = choice.experts_Tk.tolist()
    places = sorted(
        {(chunk_of_token[t], e // LOCAL, t) for t, row in enumerate(experts) for e in row if e >= 0}
    )
    expected = []
    for _, rank, t in places:
        there = [e >= 0 and e // LOCAL == rank for e in experts[t]]
        local = [e % LOCAL if here else -1 for e, here in zip(experts[t], there, strict=True)]
        weights = [w if here else 0 for w, here in zip(choice.weights[t].tolist(), there, strict=True)]
        expected.append([*x_TM[t].tolist(), *local, *weights])
    assert order.permute(x_TM, choice, plan).tolist() == expected
    assert plan.chunk_rows == tuple(sum(place[0] == c for place in places) for c in range(chunks))


def test_expert_numbers_survive_bfloat16() -> None:
    """With as many experts on a rank as are allowed, every one gets its own token."""
    experts_T1 = torch.arange(MOST_EXPERTS_THERE).flip(0).unsqueeze(1)
    choice = TokenChoice(experts_T1, torch.ones_like(experts_T1).bfloat16(), NO_SUMS)
    x_TM = torch.ones(MOST_EXPERTS_THERE, 1, dtype=torch.bfloat16)
    order = MergedPermutation(MOST_EXPERTS_THERE, 1, 1)
    (out,) = run_ranks(order, [choice], [x_TM], MOST_EXPERTS_THERE)
    assert torch.equal(out, (experts_T1 + 2).bfloat16())


def test_experts_at_a_rank_that_sends_nothing() -> None:
    """All its tokens are padding, but it gets rows of others."""
    order = MergedPermutation(2, 1, 2)
    route = ChunkRoute(sent=[[0], [0]], received=[[0], [1]], rows_sent=(0, 0), rows_received=(0, 1))
    rows = torch.tensor([[5.0, 7.0, 0.0, 0.5]])  # x, local expert 0, weight 0.5
    out = order.run_experts(rows, route, Scaling(1, 1), grouped_product)
    assert out.tolist() == [[7.5, 10.5]]


@pytest.mark.parametrize(
    ("num_experts", "ranks", "why"), [(514, 2, "exact up to 256.*257"), (5, 2, "evenly")]
)
def test_refused(num_experts: int, ranks: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        MergedPermutation(num_experts, 1, ranks)
