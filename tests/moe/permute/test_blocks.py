"""Blocks of rows at the experts' side, against sorted()."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe.permute.sort import by_expert, by_source

tables = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(0, 3), min_size=width, max_size=width), min_size=1, max_size=4
    )
)


@given(tables)
def test_by_expert_sorts_by_expert_then_source(received: list[list[int]]) -> None:
    labels = [
        (source, expert, i)
        for source, row in enumerate(received)
        for expert, size in enumerate(row)
        for i in range(size)
    ]
    rows = torch.tensor(labels).view(-1, 3)
    ordered = by_expert(rows, received)
    wanted = sorted(labels, key=lambda label: (label[1], label[0], label[2]))
    assert [tuple(row) for row in ordered.tolist()] == wanted
    assert torch.equal(by_source(ordered, received), rows)
