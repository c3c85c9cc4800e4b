"""Orders against plain loops: which row every choice takes, and who is dropped."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.cost.workload import capacity_slots, split_sizes
from penstock.moe import MoEConfig
from penstock.moe.order import CapacityOrder, Ordered, SortOrder, build_order


@dataclass(frozen=True)
class Choices:
    """What a router chose, and the layer it chose for."""

    config: MoEConfig
    experts_Tk: Tensor

    @property
    def tokens(self) -> int:
        return self.experts_Tk.shape[0]


@st.composite
def choices(draw: st.DrawFn, *, capacity: bool) -> Choices:
    """Random choices, some of them crowded on few experts; the experts of a token are distinct."""
    num_experts = draw(st.integers(1, 6))
    config = MoEConfig(
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        capacity_factor=draw(st.sampled_from([0.3, 0.5, 1.0, 1.7])) if capacity else None,
        min_capacity=draw(st.integers(1, 4)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    tokens, crowd = draw(st.integers(1, 20)), draw(st.sampled_from([0.0, 1.0]))
    liking_TE = torch.rand(tokens, num_experts, generator=generator) + crowd * torch.arange(num_experts)
    return Choices(config, liking_TE.topk(config.top_k).indices)


chunk_counts = st.integers(1, 30)  # often more than there are tokens or slots


def check_rows(ordered: Ordered, made: Choices) -> None:
    """The two maps of the plan are each other's inverse, and the rows of the chunks add up."""
    row_of_choice = ordered.rows.row_of_choice_Tk.flatten().tolist()
    choice_of_row = ordered.rows.choice_of_row_R.tolist()
    assert len(choice_of_row) == sum(ordered.chunk_rows)
    inverse = [-1] * len(choice_of_row)
    for choice, row in enumerate(row_of_choice):
        if row >= 0:
            assert inverse[row] == -1, "two choices in one row"
            inverse[row] = choice
    assert choice_of_row == inverse
    k = made.config.top_k
    assert ordered.rows.token_of_row_R.tolist() == [c // k if c >= 0 else -1 for c in choice_of_row]
    chosen = made.experts_Tk.flatten().tolist()
    assert ordered.tokens_per_expert_E.tolist() == [chosen.count(e) for e in range(made.config.num_experts)]
    assert ordered.tokens_per_expert_E.dtype == torch.int64


@given(choices(capacity=False), chunk_counts)
def test_sorted_by_chunk_then_expert_then_token(made: Choices, chunks: int) -> None:
    ordered = SortOrder(made.config).plan(made.experts_Tk, chunks)
    check_rows(ordered, made)
    sizes = split_sizes(made.tokens, chunks)
    chunk_of_token = [chunk for chunk, size in enumerate(sizes) for _ in range(size)]
    k = made.config.top_k
    flat = [
        (chunk_of_token[token], int(expert), token * k + choice)
        for token, row in enumerate(made.experts_Tk)
        for choice, expert in enumerate(row)
    ]
    assert ordered.rows.choice_of_row_R.tolist() == [choice for *_, choice in sorted(flat)]
    assert not ordered.rows.padded
    assert ordered.slots is None
    assert ordered.chunk_rows == tuple(size * k for size in sizes)
    counts = [[0] * made.config.num_experts for _ in sizes]
    for chunk, expert, _ in flat:
        counts[chunk][expert] += 1
    assert ordered.counts_CE is not None
    assert ordered.counts_CE.tolist() == counts


@given(choices(capacity=True), chunk_counts)
def test_first_choices_then_token_order_take_the_slots(made: Choices, chunks: int) -> None:
    config = made.config
    assert config.capacity_factor is not None
    ordered = CapacityOrder(config).plan(made.experts_Tk, chunks)
    check_rows(ordered, made)
    slots = capacity_slots(
        made.tokens, config.num_experts, config.top_k, config.capacity_factor, config.min_capacity
    )
    sizes = split_sizes(slots, chunks)
    taken = [0] * config.num_experts
    for choice in range(config.top_k):
        for token in range(made.tokens):
            expert = int(made.experts_Tk[token, choice])
            row = int(ordered.rows.row_of_choice_Tk[token, choice])
            assert row == row_of_slot(expert, taken[expert], sizes, config.num_experts)
            taken[expert] += 1
    assert ordered.rows.padded
    assert ordered.counts_CE is None
    assert ordered.slots == sizes
    assert ordered.chunk_rows == tuple(size * config.num_experts for size in sizes)


def row_of_slot(expert: int, slot: int, sizes: tuple[int, ...], num_experts: int) -> int:
    """Walk over the chunks: chunk by chunk, inside a chunk expert by expert. -1 behind the last slot."""
    row = 0
    for size in sizes:
        if slot < size:
            return row + expert * size + slot
        slot -= size
        row += size * num_experts
    return -1


@given(choices(capacity=True), chunk_counts)
def test_who_is_dropped_does_not_depend_on_the_chunks(made: Choices, chunks: int) -> None:
    order = CapacityOrder(made.config)
    whole, cut = (order.plan(made.experts_Tk, c).rows.row_of_choice_Tk < 0 for c in (1, chunks))
    assert torch.equal(whole, cut)


def test_a_first_choice_goes_before_an_earlier_token() -> None:
    config = MoEConfig(num_experts=2, top_k=2, capacity_factor=0.5, min_capacity=1)
    ordered = CapacityOrder(config).plan(torch.tensor([[0, 1], [1, 0]]), 1)
    # One slot per expert: token 0's second choice loses to token 1's first choice.
    assert ordered.rows.row_of_choice_Tk.tolist() == [[0, -1], [1, -1]]


def test_min_capacity_adds_slots() -> None:
    config = MoEConfig(num_experts=2, top_k=1, capacity_factor=0.5, min_capacity=3)
    ordered = CapacityOrder(config).plan(torch.zeros(4, 1, dtype=torch.int64), 1)
    assert ordered.slots == (3,)
    assert ordered.rows.row_of_choice_Tk.flatten().tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize(
    ("factor", "chunk_rows"),
    [(None, (2, 2, 2, 0, 0, 0)), (1.0, (3, 3, 0, 0, 0, 0))],
    ids=["sort", "capacity"],
)
def test_more_chunks_than_there_is_leaves_empty_ones(
    factor: float | None, chunk_rows: tuple[int, ...]
) -> None:
    config = MoEConfig(num_experts=3, top_k=2, capacity_factor=factor, min_capacity=1)
    ordered = build_order(config).plan(torch.tensor([[0, 1], [2, 1], [0, 2]]), 6)
    assert ordered.chunk_rows == chunk_rows


def test_the_capacity_decides_which_order() -> None:
    assert isinstance(build_order(MoEConfig()), SortOrder)
    assert isinstance(build_order(MoEConfig(capacity_factor=1.0)), CapacityOrder)
    assert SortOrder.dynamic
    assert not CapacityOrder.dynamic
