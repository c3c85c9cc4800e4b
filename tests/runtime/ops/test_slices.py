"""Blocks of rows from slices to ranks and back: every row once, no copy where there is one slice."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.ops import as_at_home, by_position, joined, to_ranks, to_slices

sizes = st.integers(1, 4).flatmap(
    lambda ranks: st.lists(
        st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), min_size=1, max_size=4
    )
)


def labelled(blocks: list[list[int]]) -> list[torch.Tensor]:
    """Slices whose every row says its slice, its rank and its number in the block."""
    return [
        torch.tensor([[k, p, i] for p, size in enumerate(row) for i in range(size)]).view(-1, 3)
        for k, row in enumerate(blocks)
    ]


@given(sizes)
def test_rows_lie_rank_by_rank_under_way(blocks: list[list[int]]) -> None:
    rows = to_ranks(labelled(blocks), blocks).tolist()
    ranks = range(len(blocks[0]))
    assert rows == [[k, p, i] for p in ranks for k, row in enumerate(blocks) for i in range(row[p])]


@given(sizes)
def test_they_come_back_as_they_were(blocks: list[list[int]]) -> None:
    slices = labelled(blocks)
    back = to_slices(to_ranks(slices, blocks), blocks)
    assert len(back) == len(slices)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, slices, strict=True))


def test_one_slice_is_not_copied() -> None:
    rows = torch.ones(5, 2)
    assert to_ranks([rows], [[2, 3]]) is rows
    assert to_slices(rows, [[2, 3]])[0] is rows
    assert joined([rows]) is rows


@given(st.permutations(range(6)), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_rows_that_lie_by_expert_leave_by_position_and_come_back(home: list[int], sizes: list[int]) -> None:
    """Six positions, two of each of three ranks; every row says its position and its number there."""
    sent = [sizes[:2], sizes[2:4], sizes[4:]]
    at_home, leaving = (
        torch.tensor([[q, i] for q in order for i in range(sizes[q])]).view(-1, 2)
        for order in (home, range(6))
    )
    assert torch.equal(by_position(at_home, sent, home), leaving)
    assert torch.equal(as_at_home(leaving, sent, home), at_home)
    assert by_position(leaving, sent, range(6)) is leaving
