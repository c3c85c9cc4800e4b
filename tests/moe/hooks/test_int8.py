"""Rows as bytes: how far numbers move, what takes how much room, and that words survive copies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe import hooks
from penstock.moe.hooks import SMALLEST, decode_int8, encode_int8, scale_int8
from penstock.routing.sizes import int8_row_bytes
from tests.support.ranks import Pools

OWN_ROUNDING = 1e-4
"""Of float32, in steps: three roundings of numbers up to 127."""

magnitudes = st.floats(-60, 38).map(lambda exponent: 10.0**exponent)
unit = st.floats(-1, 1, width=32)


@st.composite
def tables(draw: st.DrawFn) -> Tensor:
    """Rows of very different sizes, float32."""
    hidden = draw(st.integers(1, 9))
    rows = draw(st.lists(st.lists(unit, min_size=hidden, max_size=hidden), max_size=4))
    scales = [draw(magnitudes | st.just(0.0)) for _ in rows]
    return (
        torch.tensor(rows).double().view(len(rows), hidden) * torch.tensor(scales).double()[:, None]
    ).float()


def roundtrip(rows_RM: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return decode_int8(encode_int8(rows_RM), rows_RM.shape[1], dtype)


@given(tables())
def test_no_number_moves_by_more_than_half_a_step(rows_RM: Tensor) -> None:
    found = roundtrip(rows_RM).double()
    step_R1 = rows_RM.double().abs().amax(1, keepdim=True) / 127
    bound_R1 = step_R1 * (0.5 + OWN_ROUNDING)
    small_R1 = step_R1 <= SMALLEST * (1 + 1e-6)  # such rows may count as zero
    assert ((found - rows_RM.double()).abs() <= torch.where(small_R1, 127 * step_R1, bound_R1)).all()
    assert ((found == 0) | ~(step_R1 < SMALLEST * (1 - 1e-6))).all()


@given(tables(), st.sampled_from((0.5, 2.0, 4.0)))
def test_encoded_rows_are_scaled_by_their_scales(rows_RM: Tensor, by: float) -> None:
    words_RW = encode_int8(rows_RM)
    found = decode_int8(scale_int8(words_RW, by), rows_RM.shape[1], torch.float32)
    wanted = decode_int8(words_RW, rows_RM.shape[1], torch.float64) * by
    assert torch.equal(found, wanted.float()), "powers of two"


def test_half_a_step_is_reached() -> None:
    """The bound is no larger than it has to be."""
    rows = torch.tensor([[127.0, 0.5, 1.5, 2.5]])
    assert (roundtrip(rows) - rows).abs().tolist() == [[0, 0.5, 0.5, 0.5]]


@given(tables())
def test_zeros_and_signs_are_exact(rows_RM: Tensor) -> None:
    found = roundtrip(rows_RM)
    assert torch.equal(roundtrip(-rows_RM), -found)
    assert (found[rows_RM == 0] == 0).all()
    for small in (0.0, 1e-40):
        words_RW = encode_int8(torch.full_like(rows_RM, small))
        assert not words_RW.view(torch.int8).any(), "nothing but zero bits"


@pytest.mark.parametrize("hidden", range(1, 10))
def test_a_row_takes_the_bytes_that_the_configuration_says(hidden: int) -> None:
    words_RW = encode_int8(torch.full((3, hidden), torch.nan))
    assert words_RW.dtype == torch.float32
    assert words_RW.nbytes == 3 * int8_row_bytes(hidden)
    padding = words_RW.view(torch.int8)[:, hidden:-4]
    assert padding.shape[1] == -hidden % 4
    assert not padding.any(), "what was in memory before must not travel"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", range(5))
def test_what_is_not_finite_stays_visible(bad: float, place: int) -> None:
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    wanted = roundtrip(rows)
    rows[1, place] = bad
    found = roundtrip(rows)
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], wanted[::2]), "the other rows are not touched"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_are_encoded_as_float32(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(encode_int8(rows).view(torch.int32), encode_int8(rows.float()).view(torch.int32))
    decoded = roundtrip(rows, dtype)
    assert decoded.dtype == dtype
    assert torch.equal(decoded, roundtrip(rows.float()).to(dtype))


@pytest.mark.parametrize("block", [1, 7, 1 << 18])
def test_blocks_do_not_change_bits(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
    wanted = encode_int8(rows).view(torch.int32)
    monkeypatch.setattr(hooks, "BLOCK", block)
    assert torch.equal(encode_int8(rows).view(torch.int32), wanted)


def test_rows_may_lie_apart_in_memory() -> None:
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    for view in (rows.t(), rows[:, ::2], rows[:1].expand(4, 5)):
        assert torch.equal(
            encode_int8(view).view(torch.int32), encode_int8(view.contiguous()).view(torch.int32)
        )


def strange_words() -> Tensor:
    """Float32 words [256, 4] with every kind of NaN, denormal and infinite number among them."""
    bits = torch.arange(1024, dtype=torch.int64).view(256, 4)
    exponents = torch.tensor([0x7F800000, 0xFF800000, 0x00000000, 0x80000000])
    return (exponents + bits * 8191).to(torch.int32).view(torch.float32)


def test_words_keep_their_bits_in_every_copy_on_the_way() -> None:
    words = strange_words()
    assert words.isnan().any()
    bits = words.view(torch.int32)
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0))
    parts = words.split([100, 0, 156])
    copies = {
        "cat": torch.cat(parts),
        "cat and select": torch.cat([parts[2], parts[0]]).index_select(0, torch.arange(256).roll(100)),
        "select": words.index_select(0, order).index_select(0, order.argsort()),
        "contiguous": words.t().contiguous().t().contiguous(),
        "clone": words.clone(),
        "copy_": torch.empty_like(words).copy_(words.t().clone().t()),
        "stack": torch.stack(words.unbind()),
        "autograd": torch.autograd.grad(
            torch.cat([start := torch.zeros(256, 4, requires_grad=True)]), start, words
        )[0],
    }
    for name, copy in copies.items():
        assert torch.equal(copy.view(torch.int32), bits), name


def swap(rank: int) -> bool:
    import torch.distributed as dist

    words = strange_words()
    received = torch.empty_like(words)
    receive = dist.irecv(received, src=1 - rank)
    dist.send(words, dst=1 - rank)
    assert receive is not None
    receive.wait()
    return torch.equal(received.view(torch.int32), words.view(torch.int32))


def test_words_keep_their_bits_on_the_wire(ranks: Pools) -> None:
    assert all(ranks(2).run(swap))
