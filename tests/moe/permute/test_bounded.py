"""The bounded permutation: rows of known sizes, and the outputs of the sort permutation where they
suffice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.dispatch import FlatDispatch, Place
from penstock.moe.permute.slots import BoundedPermutation, Bounds
from penstock.moe.permute.sort import SortPermutation
from penstock.moe.routers import TokenChoice
from penstock.routing.routes import RouteMaker
from tests.moe.permute.support import chunk_counts, numbers, token_choices

EXPERTS = 4
bounds = st.lists(st.integers(1, 9), min_size=EXPERTS, max_size=EXPERTS)


def loads(choice: TokenChoice) -> list[int]:
    """How often each expert was chosen."""
    return [int((choice.experts_Tk == expert).sum()) for expert in range(EXPERTS)]


@given(token_choices(EXPERTS), chunk_counts, bounds)
def test_sizes_follow_from_bounds_alone(choice: TokenChoice, chunks: int, rows: list[int]) -> None:
    order = BoundedPermutation(EXPERTS, 1.0)
    with order.bounded(Bounds(rows)):
        plan = order.plan(choice, chunks)
    assert plan.counts_CN is None and plan.bounds_CN is not None and plan.wanted_N is not None
    assert plan.bounds_CN.shape == (chunks, EXPERTS)
    assert plan.bounds_CN.sum(axis=0).tolist() == rows
    assert plan.chunk_rows == tuple(plan.bounds_CN.sum(axis=1).tolist())
    assert plan.wanted_N.tolist() == loads(choice)


@given(token_choices(EXPERTS), chunk_counts, st.integers(0, 99), st.integers(0, 5))
def test_outputs_are_those_of_sorted_rows(choice: TokenChoice, chunks: int, seed: int, spare: int) -> None:
    """Each row is multiplied by a number of its expert, as experts would."""
    x_TM = numbers(len(choice.experts_Tk), 3, seed=seed)
    order, found = BoundedPermutation(EXPERTS, 1.0), []
    for rows in (None, Bounds([max(1, load) + spare for load in loads(choice)])):
        with order.bounded(rows):
            plan = order.plan(choice, chunks)
        sizes_CN = plan.counts_CN if plan.bounds_CN is None else torch.from_numpy(plan.bounds_CN)
        assert sizes_CN is not None
        expert_R = torch.arange(EXPERTS).repeat(chunks).repeat_interleave(sizes_CN.flatten())
        rows_RM = order.permute(x_TM, choice, plan) * (expert_R + 1).unsqueeze(1)
        found.append(order.unpermute(rows_RM, choice.weights, plan))
    assert torch.equal(*found)


@given(token_choices(EXPERTS), chunk_counts, bounds)
def test_what_has_no_row_is_known(choice: TokenChoice, chunks: int, rows: list[int]) -> None:
    """As many choices as are wanted beyond bounds have none, and every row serves a choice of its expert."""
    order = BoundedPermutation(EXPERTS, 1.0)
    with order.bounded(Bounds(rows)):
        plan = order.plan(choice, chunks)
    served = plan.rows.row_of_weight[choice.experts_Tk >= 0]
    beyond = sum(max(0, load - bound) for load, bound in zip(loads(choice), rows, strict=True))
    assert int((served < 0).sum()) == beyond
    assert plan.bounds_CN is not None
    expert_R = (
        torch.arange(EXPERTS).repeat(chunks).repeat_interleave(torch.from_numpy(plan.bounds_CN).flatten())
    )
    taken = plan.rows.row_of_weight >= 0
    assert torch.equal(expert_R[plan.rows.row_of_weight[taken]], choice.experts_Tk[taken])
    assert plan.rows.row_of_weight[taken].unique().numel() == int(taken.sum())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_routes_are_those_of_counts_that_all_ranks_have(ranks: int) -> None:
    rows_CX = torch.arange(1, 2 * ranks * 3 + 1).view(2, -1).numpy()
    for rank in range(ranks):
        maker = RouteMaker(FlatDispatch(), Place(rank, ranks, ranks))
        table = rows_CX.reshape(2, ranks, 3).transpose(1, 0, 2)[None].repeat(ranks, axis=0)
        assert maker.fixed(rows_CX) == maker.from_table(table)


def test_without_bounds_it_is_the_sort_order() -> None:
    assert BoundedPermutation.dynamic and issubclass(BoundedPermutation, SortPermutation)
    with pytest.raises(ValueError, match=r"placement\.experts"):
        BoundedPermutation(EXPERTS, 1.0).with_slots(2, 3)
