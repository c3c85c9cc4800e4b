"""Slots against plain loops: who takes which, and who is dropped. The einsum permutation must agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe.permute.einsum import EinsumPermutation
from penstock.moe.permute.slots import IndexPermutation
from penstock.moe.routers import Choice, ExpertChoice, TokenChoice, Tokens, made_for
from penstock.routing.sizes import capacity_slots, split_sizes
from tests.moe.permute.support import (
    HIDDEN,
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


def build(order: Any, capacity: Capacity) -> Any:
    return order(EXPERTS, capacity_factor=capacity.factor, min_capacity=capacity.minimum)


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
@given(token_choices(EXPERTS), capacities, st.integers(0, 9), chunk_counts)
def test_first_choices_then_token_order_take_the_slots(
    order: Any, choice: TokenChoice, capacity: Capacity, more: int, chunks: int
) -> None:
    """Slots are made for the rank with most tokens, which may have some more."""
    tokens, top_k = choice.experts_Tk.shape
    slots = capacity_slots(tokens + more, EXPERTS, top_k, capacity.factor, capacity.minimum)
    filled = [(expert, slot, token) for expert, slot, token, _ in first_come(choice, EXPERTS, slots)]
    check(build(order, capacity), made_for(choice, Tokens(most=tokens + more)), slots, chunks, filled)


@pytest.mark.parametrize("order", ORDERS)
@given(choice=expert_choices(EXPERTS), chunks=chunk_counts)
def test_where_experts_choose_a_slot_is_a_choice(order: Any, choice: ExpertChoice, chunks: int) -> None:
    named = choice.tokens_ES.tolist()
    filled = [(e, s, token) for e, row in enumerate(named) for s, token in enumerate(row)]
    check(order(EXPERTS), choice, choice.tokens_ES.shape[1], chunks, filled)


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
