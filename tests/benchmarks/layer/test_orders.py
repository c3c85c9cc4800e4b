"""What orders must move, against a count by hand; what is measured is all there."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.layer.orders import (
    STAGES,
    TOGETHER,
    OrderResult,
    RowCounts,
    draw_choice,
    measure_orders,
    round_trip,
)
from penstock.moe.choices import GateSums, TokenChoice
from penstock.moe.orders.base import Order
from penstock.moe.orders.einsum import EinsumOrder
from penstock.moe.orders.index import IndexOrder
from penstock.moe.orders.sort import SortOrder

ROW_BYTES = 10


def by_hand() -> TokenChoice:
    """Four tokens, three experts. With two slots each, expert 0 has no room for tokens 2 and 3.

    First choices 0, 0, 0, 0; second ones 1, 2, 1, 1. Expert 1 fills up with tokens 0 and 2; so of token 3
    nothing is left, and one slot of expert 2 stays empty.
    """
    sums = GateSums(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3), torch.zeros(()))
    experts_Tk = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1]])
    return TokenChoice(experts_Tk, torch.full((4, 2), 0.5).requires_grad_(), sums)


def counted(order: Order) -> RowCounts:
    return RowCounts.of(order, by_hand())


@pytest.mark.parametrize("order", [IndexOrder, EinsumOrder])
def test_rows_of_a_capacity_are_counted_as_by_hand(order: type[IndexOrder | EinsumOrder]) -> None:
    found = counted(order(3, capacity_factor=0.75, min_capacity=1))
    assert found == RowCounts(tokens=4, used=3, rows=6, kept=5)


def test_rows_without_padding_are_counted_as_by_hand() -> None:
    assert counted(SortOrder(3)) == RowCounts(tokens=4, used=4, rows=8, kept=8)


def test_bytes_are_what_is_read_and_what_is_written() -> None:
    counts = RowCounts(tokens=4, used=3, rows=6, kept=5)
    found = {stage: counts.bytes_of(stage, ROW_BYTES) for stage in (*STAGES, TOGETHER)}
    assert found == {
        "plan": 0,
        "order": (3 + 6) * ROW_BYTES,  # tokens that go anywhere, all rows
        "un-order": (5 + 4) * ROW_BYTES,  # rows that are no padding, all tokens
        "un-order backward": (3 + 5 + 6) * ROW_BYTES,  # gradients, rows (for the weights), gradients of rows
        "order backward": (5 + 4) * ROW_BYTES,
        TOGETHER: (9 + 9 + 14 + 9) * ROW_BYTES,
    }


def measured(**options: float) -> OrderResult:
    return measure_orders(shapes=((24, 8), (32, 4)), experts=(2, 4), rounds=3, **options)  # type: ignore[arg-type]


def test_everything_is_measured() -> None:
    found = measured()
    names = ["sort", "index", "einsum"]
    assert [(case.tokens, case.experts, case.order) for case in found.cases] == [
        (tokens, experts, name) for tokens in (24, 32) for experts in (2, 4) for name in names
    ]
    for case in found.cases:
        assert [stage.stage for stage in case.stages] == [*STAGES, TOGETHER]
        assert case.copy_byte_per_s.median > 0
        for stage in case.stages:
            assert 0 < stage.time_s.low <= stage.time_s.median <= stage.time_s.high
            assert stage.moved_bytes == case.counts.bytes_of(stage.stage, 4 * case.hidden_size)
            assert (stage.of_copy is None) == (stage.stage == "plan")


def test_einsum_is_left_out_where_its_mask_is_too_large() -> None:
    mask_bytes = 4 * 24 * 1.25 * 2 * 24
    found = measured(most_mask_bytes=mask_bytes)
    assert {case.tokens for case in found.cases if case.order == "einsum"} == {24}


def test_json_and_back() -> None:
    found = measured()
    plain = json.loads(json.dumps(found.to_dict()))
    assert OrderResult.from_dict(plain).to_dict() == found.to_dict()
    order = plain["cases"][0]["stages"][1]
    assert order["byte_per_s"] == order["moved_bytes"] / order["time_s"]["median"]


def test_a_round_trip_has_every_stage() -> None:
    x_TM = torch.randn(16, 8, requires_grad=True)
    choice = draw_choice(16, 4, 2)
    assert set(round_trip(SortOrder(4), x_TM, choice)) == set(STAGES)
    assert x_TM.grad is None and choice.weights.grad is None, "nothing is kept for the next round"


def test_a_choice_is_the_same_every_time_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second = (draw_choice(16, 4, 2) for _ in range(2))
    assert torch.equal(first.experts_Tk, second.experts_Tk)
    assert torch.equal(torch.get_rng_state(), state)
