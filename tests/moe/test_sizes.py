"""Sizes on the device, and blocks of rows that are put in another order by index."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe import products
from penstock.moe.products import ends_of, reordered
from penstock.routing.routes import GroupSizes

CPU = torch.device("cpu")


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sizes of blocks, and an order of them; it may leave out blocks without rows."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=24))
    order = draw(st.permutations(range(len(sizes))))
    without = draw(st.booleans())
    return sizes, [block for block in order if sizes[block] or not without]


@given(blocks())
def test_by_index_rows_and_gradients_are_those_of_concatenated_views(
    case: tuple[list[int], list[int]],
) -> None:
    sizes, order = case
    rows = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(sum(sizes), 3, dtype=torch.float64)
    parts = rows.split(sizes)
    wanted = torch.cat([parts[block] for block in order]) if order else rows[:0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "is_for_views", lambda rows, blocks: False)
        found = reordered(rows, sizes, order)
    assert torch.equal(found, wanted)
    ours, theirs = (torch.autograd.grad(out, rows, grad)[0] for out in (found, wanted))
    assert torch.equal(ours, theirs)


def test_ends_are_copied_once() -> None:
    sizes = GroupSizes((2, 0, 3))
    assert ends_of(sizes, CPU).tolist() == [2, 2, 5]
    assert ends_of(sizes, CPU) is sizes.ends
    assert ends_of([1, 1], CPU).tolist() == [1, 2]
    assert ends_of(sizes, CPU).dtype == torch.int32
