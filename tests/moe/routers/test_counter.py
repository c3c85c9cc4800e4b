"""Random numbers that hang on run, place, sample and position alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.gates import normal
from penstock.moe.routers import SampleKeys, uniform_bits
from tests.support.samples import SHAPE, keys, sample_ids, seeds

LARGE = torch.Size((64, 64, 64))
Draw = Callable[[torch.Size, int, SampleKeys], Tensor]


@pytest.mark.parametrize("draw", [uniform_bits, normal])
@given(ids=sample_ids, seed=seeds, cut=st.integers(1, 4))
def test_numbers_do_not_depend_on_how_the_batch_is_cut(
    draw: Draw, ids: list[int], seed: int, cut: int
) -> None:
    whole = draw(torch.Size(SHAPE), 3, keys(ids, seed))
    halves = [
        draw(torch.Size((len(part), *SHAPE[1:])), 3, keys(part, seed)) for part in (ids[:cut], ids[cut:])
    ]
    assert torch.equal(torch.cat(halves), whole)
    assert torch.equal(draw(torch.Size(SHAPE), 3, keys(ids[::-1], seed)), whole.flip(0))


@given(sample_ids, seeds)
def test_padding_a_sample_leaves_its_numbers(ids: list[int], seed: int) -> None:
    short, long = (uniform_bits(torch.Size((5, length, 6)), 3, keys(ids, seed)) for length in (4, 7))
    assert torch.equal(long[:, :4], short)


@given(sample_ids, seeds)
def test_places_samples_and_seeds_draw_different_numbers(ids: list[int], seed: int) -> None:
    base = uniform_bits(torch.Size(SHAPE), 3, keys(ids, seed))
    assert not torch.equal(uniform_bits(torch.Size(SHAPE), 4, keys(ids, seed)), base)
    assert not torch.equal(uniform_bits(torch.Size(SHAPE), 3, keys(ids, seed ^ 1)), base)
    for i in range(5):
        for j in range(i):
            assert not torch.equal(base[i], base[j])


@pytest.mark.parametrize("high", [0, 1, 2**20])
def test_all_bits_of_a_sample_number_count(high: int) -> None:
    shape = torch.Size((2, *SHAPE[1:]))
    first, second = uniform_bits(shape, 0, keys([(high << 32) + 5, ((high + 1) << 32) + 5]))
    assert not torch.equal(first, second)


def test_all_32_bits_are_fair_coins() -> None:
    bits = uniform_bits(LARGE, 1, keys(list(range(64))))
    assert bits.min() >= 0
    assert bits.max() < 2**32
    for bit in range(32):
        share = float(((bits >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / bits.numel() ** 0.5  # five standard deviations, a fixed draw


def test_no_sample_row_or_column_is_preferred() -> None:
    high = (uniform_bits(LARGE, 1, keys(list(range(64)))) >= 2**31).double()
    for dim in ((1, 2), (0, 2), (0, 1)):
        assert (high.mean(dim) - 0.5).abs().max() < 5 * 0.5 / 64


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    x = normal(LARGE, 2, keys(list(range(64))))
    count = x.numel()
    # Five standard deviations of each estimate: variances of x, x^2, x^3, x^4 are 1, 2, 15, 96.
    for power, (mean, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs(float((x**power).mean()) - mean) < 5 * (variance / count) ** 0.5
    inside = float((x.abs() < 1).double().mean())
    assert abs(inside - 0.6826895) < 5 * (0.6826895 * 0.3173105 / count) ** 0.5
    assert x.dtype == torch.float64
    assert x.isfinite().all()


def test_normal_numbers_of_two_places_are_independent() -> None:
    ids = keys(list(range(64)))
    draws = torch.stack([normal(LARGE, place, ids).flatten() for place in range(4)])
    correlation = torch.corrcoef(draws) - torch.eye(4)
    assert correlation.abs().max() < 5 / LARGE.numel() ** 0.5
