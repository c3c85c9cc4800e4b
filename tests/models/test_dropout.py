"""Dropout whose masks hang on run, place and sample alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.models.decoder import CounterDropout
from penstock.moe.choices import uniform_bits
from tests.support.samples import SHAPE, keys, sample_ids, seeds


def ones(samples: int = 5, length: int = 7, hidden: int = 6) -> Tensor:
    return torch.ones(samples, length, hidden)


@given(sample_ids, seeds, st.integers(1, 4))
def test_the_mask_does_not_depend_on_how_the_batch_is_cut(ids: list[int], seed: int, cut: int) -> None:
    dropout = CounterDropout(0.5, place=3)
    whole = dropout(ones(), keys(ids, seed))
    parts = [dropout(ones(len(part)), keys(part, seed)) for part in (ids[:cut], ids[cut:])]
    assert torch.equal(torch.cat(parts), whole)
    backwards = dropout(ones(), keys(ids[::-1], seed))
    assert torch.equal(backwards, whole.flip(0))


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_the_share_of_zeros_is_p(p: float) -> None:
    out = CounterDropout(p, place=1)(ones(64, 64, 64), keys(list(range(64))))
    dropped, count = float((out == 0).double().mean()), out.numel()
    assert abs(dropped - p) < 5 * (p * (1 - p) / count) ** 0.5  # five standard deviations, a fixed draw
    torch.testing.assert_close(out[out != 0], torch.full((1,), 1 / (1 - p)).expand(int((out != 0).sum())))


def test_different_masks_are_independent() -> None:
    """Two places agree on as many elements as two coins would."""
    shape, ids = torch.Size((16, 32, 32)), keys(list(range(16)))
    masks = [uniform_bits(shape, place, ids) >= 2**31 for place in range(6)]
    masks.append(uniform_bits(shape, 0, keys(list(range(1, 17)))) >= 2**31)
    masks.append(uniform_bits(shape, 0, keys(list(range(16)), seed=1)) >= 2**31)
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            agreed = float((mask == other).double().mean())
            assert abs(agreed - 0.5) < 5 * 0.5 / shape.numel() ** 0.5


def test_nothing_happens_in_evaluation_or_without_p() -> None:
    x_BLM = torch.randn(SHAPE)
    assert CounterDropout(0.5, place=0).eval()(x_BLM, keys([0, 1, 2, 3, 4])) is x_BLM
    assert CounterDropout(0.0, place=0)(x_BLM, keys([0, 1, 2, 3, 4])) is x_BLM


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_passes_where_the_value_passes(dtype: torch.dtype) -> None:
    x_BLM = torch.ones(SHAPE, dtype=dtype, requires_grad=True)
    out = CounterDropout(0.4, place=0)(x_BLM, keys([0, 1, 2, 3, 4]))
    out.sum().backward()
    assert out.dtype == dtype
    assert x_BLM.grad is not None
    assert torch.equal(x_BLM.grad, out.detach())
