"""Slots against plain loops: who takes which, and who is dropped. The einsum permutation must agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.permute.einsum import EinsumPermutation
from penstock.moe.permute.slots import IndexPermutation
from penstock.moe.routers import Choice, ExpertChoice, TokenChoice, Tokens, made_for
from penstock.routing.sizes import capacity_slots, split_sizes
from tests.moe.permute.support import (
    HIDDEN,
    NO_SUMS,
    Capacity,
    capacities,
    chunk_counts,
    expert_choices,
    first_come,
    numbers,
    row_of_slot,
    token_choices,
    tokens_of,
)

EXPERTS = 4
ORDERS = [IndexPermutation, EinsumPermutation]


def build(order: Any, capacity: Capacity, num_experts: int = EXPERTS) -> Any:
    return order(num_experts, capacity_factor=capacity.factor, min_capacity=capacity.minimum)


def check(order: Any, choice: Choice, slots: int, chunks: int, filled: list[tuple[int, int, int]]) -> None:
    """Rows hold the tokens of filled (expert, slot, token), and zeros elsewhere."""
    plan, sizes = order.plan(choice, chunks), split_sizes(slots, chunks)
    assert (plan.tokens, plan.counts_CN, plan.slots) == (tokens_of(choice), None, sizes)
    assert plan.chunk_rows == tuple(size * EXPERTS for size in sizes)
    x_TM = numbers(plan.tokens, HIDDEN)
    expected = torch.zeros(slots * EXPERTS, HIDDEN, dtype=torch.float64)
    for expert, slot, token in filled:
        expected[row_of_slot(expert, slot, sizes, EXPERTS)] = x_TM[token].detach()
    assert torch.equal(order.permute(x_TM, choice, plan), expected)


@pytest.mark.parametrize("order", ORDERS)
@given(choice=token_choices(EXPERTS), capacity=capacities, chunks=chunk_counts)
def test_first_choices_then_token_order_take_the_slots(
    order: Any, choice: TokenChoice, capacity: Capacity, chunks: int
) -> None:
    slots = capacity.slots(choice, EXPERTS)
    filled = [(expert, slot, token) for expert, slot, token, _ in first_come(choice, EXPERTS, slots)]
    check(build(order, capacity), choice, slots, chunks, filled)


@pytest.mark.parametrize("order", ORDERS)
@given(choice=token_choices(EXPERTS), capacity=capacities, more=st.integers(0, 9))
def test_slots_are_made_for_the_rank_with_most_tokens(
    order: Any, choice: TokenChoice, capacity: Capacity, more: int
) -> None:
    tokens, top_k = choice.experts_Tk.shape
    most = tokens + more
    slots = capacity_slots(most, EXPERTS, top_k, capacity.factor, capacity.minimum)
    filled = [(expert, slot, token) for expert, slot, token, _ in first_come(choice, EXPERTS, slots)]
    check(build(order, capacity), made_for(choice, Tokens(most=most)), slots, 2, filled)


@pytest.mark.parametrize("order", ORDERS)
@given(choice=expert_choices(EXPERTS), chunks=chunk_counts)
def test_where_experts_choose_a_slot_is_a_choice(order: Any, choice: ExpertChoice, chunks: int) -> None:
    named = choice.tokens_ES.tolist()
    filled = [(e, s, token) for e, row in enumerate(named) for s, token in enumerate(row)]
    check(order(EXPERTS), choice, choice.tokens_ES.shape[1], chunks, filled)


@given(token_choices(EXPERTS), capacities, chunk_counts)
def test_both_orders_drop_the_same(choice: TokenChoice, capacity: Capacity, chunks: int) -> None:
    def received(order: Any) -> tuple[Tensor, Tensor]:
        """What one-hot weights and constant rows leave of each choice: 1 if kept, 0 if dropped."""
        plan = order.plan(choice, chunks)
        rows = torch.ones(sum(plan.chunk_rows), 1, dtype=torch.float64)
        weights = torch.ones_like(choice.weights).requires_grad_()
        out_T1 = order.unpermute(rows, weights, plan)
        return out_T1, torch.autograd.grad(out_T1.sum(), weights)[0]

    (out, kept), (other_out, other_kept) = (received(build(order, capacity)) for order in ORDERS)
    assert torch.equal(kept, other_kept)
    assert torch.equal(out, other_out)


def test_a_first_choice_goes_before_an_earlier_token() -> None:
    choice = TokenChoice(torch.tensor([[0, 1], [1, 0]]), numbers(2, 2), NO_SUMS)
    plan = build(IndexPermutation, Capacity(0.5, 1), num_experts=2).plan(choice, 1)
    # One slot per expert: token 0's second choice loses to token 1's first choice.
    assert plan.rows.row_of_weight.tolist() == [[0, -1], [1, -1]]


@pytest.mark.parametrize("order", ORDERS)
def test_min_capacity_adds_slots(order: Any) -> None:
    choice = TokenChoice(torch.zeros(4, 1, dtype=torch.int64), numbers(4, 1), NO_SUMS)
    order = build(order, Capacity(0.5, 3), num_experts=2)
    plan = order.plan(choice, 1)
    assert plan.slots == (3,)
    x_TM = numbers(4, HIDDEN).detach()
    assert torch.equal(order.permute(x_TM, choice, plan)[:3], x_TM[:3])


@pytest.mark.parametrize("order", ORDERS)
def test_more_chunks_than_slots_leave_empty_ones(order: Any) -> None:
    choice = TokenChoice(torch.tensor([[0, 1], [2, 1], [0, 2]]), numbers(3, 2), NO_SUMS)
    plan = build(order, Capacity(1.0, 1), num_experts=3).plan(choice, 4)
    assert plan.chunk_rows == (3, 3, 0, 0)


@given(token_choices(EXPERTS), st.integers(1, 3))
def test_padding_rows_are_never_read(choice: TokenChoice, chunks: int) -> None:
    """Whatever an expert makes of zeros, be it NaN: no token sees it."""
    order = build(IndexPermutation, Capacity(1.7, 2))
    plan = order.plan(choice, chunks)
    rows_RM = numbers(sum(plan.chunk_rows), HIDDEN).detach()
    clean = order.unpermute(rows_RM, choice.weights, plan)
    rows_RM[plan.rows.token_of_row_R < 0] = float("nan")
    assert torch.equal(order.unpermute(rows_RM, choice.weights, plan), clean)


@given(token_choices(EXPERTS, masked=True))
def test_padding_tokens_are_never_read(choice: TokenChoice) -> None:
    order = build(IndexPermutation, Capacity(1.7, 2))
    x_TM = numbers(len(choice.experts_Tk), HIDDEN).detach()
    x_TM[choice.experts_Tk[:, 0] < 0] = float("nan")
    assert not order.permute(x_TM, choice, order.plan(choice, 1)).isnan().any()


def test_sizes_are_fixed() -> None:
    assert not IndexPermutation.dynamic
    assert not EinsumPermutation.dynamic
