"""Counting and summing by sample, against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.routers import RouterSums, Tokens, count_choices, sum_by_sample, sum_z

sizes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
"""Samples, tokens per sample, experts."""
seeds = st.integers(0, 9999)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mask(count: int, seed: int) -> Tensor:
    return torch.rand(count, generator=generator(seed + 1)) < 0.5


@given(sizes, st.integers(1, 3), seeds)
def test_choices_are_counted_by_sample(size: tuple[int, int, int], top_k: int, seed: int) -> None:
    samples, length, num_experts = size
    experts_Tk = torch.randint(-1, num_experts, (samples * length, top_k), generator=generator(seed))
    expected = [[0] * num_experts for _ in range(samples)]
    for t, row in enumerate(experts_Tk.tolist()):
        for expert in row:
            if expert >= 0:
                expected[t // length][expert] += 1
    counts = count_choices(experts_Tk, samples, num_experts)
    assert counts.dtype == torch.int64
    assert counts.tolist() == expected
    assert RouterSums(counts, torch.zeros(1), torch.zeros(1)).chosen_E.tolist() == [
        sum(column) for column in zip(*expected, strict=True)
    ]


@pytest.mark.parametrize("padded", [False, True])
@given(sizes, seeds)
def test_values_are_summed_by_sample(padded: bool, size: tuple[int, int, int], seed: int) -> None:
    samples, length, num_experts = size
    value_TE = torch.rand(samples * length, num_experts, generator=generator(seed)).double()
    valid_T = mask(samples * length, seed) if padded else None
    found_BE = sum_by_sample(value_TE, Tokens(samples=samples, valid_T=valid_T))
    for b in range(samples):
        for e in range(num_experts):
            there = [t for t in range(b * length, (b + 1) * length) if valid_T is None or valid_T[t]]
            assert float(found_BE[b, e]) == pytest.approx(sum(float(value_TE[t, e]) for t in there))


@pytest.mark.parametrize("padded", [False, True])
@given(sizes, seeds)
def test_z_is_the_squared_log_partition(padded: bool, size: tuple[int, int, int], seed: int) -> None:
    samples, length, num_experts = size
    logits_TE = torch.randn(samples * length, num_experts, generator=generator(seed)).double()
    valid_T = mask(samples * length, seed) if padded else None
    rows = [row for t, row in enumerate(logits_TE.tolist()) if valid_T is None or valid_T[t]]
    expected = sum(math.log(sum(math.exp(value) for value in row)) ** 2 for row in rows)
    assert float(sum_z(logits_TE, Tokens(samples=samples, valid_T=valid_T))) == pytest.approx(expected)


def test_padding_gets_no_gradient() -> None:
    logits_TE = torch.randn(4, 3, requires_grad=True)
    tokens = Tokens(samples=2, valid_T=torch.tensor([True, False, True, True]))
    (sum_z(logits_TE, tokens) + sum_by_sample(logits_TE.softmax(-1).square(), tokens).sum()).backward()
    assert logits_TE.grad is not None
    assert (logits_TE.grad.norm(dim=1) > 0).tolist() == [True, False, True, True]
