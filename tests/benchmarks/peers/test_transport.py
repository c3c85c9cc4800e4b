"""Receives first, against torch's own all-to-all on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers import receives_first
from benchmarks.peers.transport import all_to_all_single
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

UNEVEN = [[0, 3, 1], [2, 0, 4], [5, 1, 0]]
"""Rows from rank (first index) to rank (second index); some pairs exchange nothing."""


def _rows(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(count * 2).reshape(count, 2) + 100 * rank).to(dtype)


def _moved(rank: int, splits: list[list[int]], dtype: torch.dtype) -> Tensor:
    outgoing, incoming = splits[rank], [row[rank] for row in splits]
    output = torch.empty(sum(incoming), 2, dtype=dtype)
    dist.all_to_all_single(output, _rows(rank, sum(outgoing), dtype), incoming, outgoing)
    return output


def _uneven(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with receives_first():
        ours = _moved(rank, UNEVEN, dtype)
    return ours, _moved(rank, UNEVEN, dtype)


def _even_in_a_group(rank: int) -> tuple[Tensor, Tensor]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, rows = pairs[rank // 2], _rows(rank, 6, torch.float32).t().contiguous().t()  # not contiguous
    ours, theirs = torch.empty(6, 2), torch.empty(6, 2)
    with receives_first():
        dist.all_to_all_single(ours, rows, group=mine)
    dist.all_to_all_single(theirs, rows.contiguous(), group=mine)
    dist.destroy_process_group(mine)
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_uneven_and_empty_shares_move_as_torch_moves_them(ranks: Pools, dtype: torch.dtype) -> None:
    for ours, theirs in ranks(3).run(_uneven, dtype):
        assert torch.equal(ours, theirs)


def test_even_shares_inside_a_group(ranks: Pools) -> None:
    for ours, theirs in ranks(4).run(_even_in_a_group):
        assert torch.equal(ours, theirs)


def test_the_original_returns_on_any_exit() -> None:
    original = dist.all_to_all_single
    with receives_first():
        assert dist.all_to_all_single is all_to_all_single
    assert dist.all_to_all_single is original
    with pytest.raises(KeyError), receives_first():
        raise KeyError
    assert dist.all_to_all_single is original


def test_an_asynchronous_call_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="async_op=True"):
        all_to_all_single(torch.empty(2), torch.empty(2), async_op=True)


def _indivisible(rank: int) -> str:
    try:
        all_to_all_single(torch.empty(3), torch.full((3,), rank))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_rows_that_cannot_be_shared_are_refused(ranks: Pools) -> None:
    assert (
        ranks(2).run(_indivisible) == ["receives first: 3 output rows cannot be shared evenly by 2 ranks"] * 2
    )
