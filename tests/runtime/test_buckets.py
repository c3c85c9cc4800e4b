"""Gradient buckets: views of one buffer, slices without gap or overlap, nothing reduced twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.runtime.buckets import GradientBucket
from penstock.schedule import ScheduleConfig
from tests.support.parity import Case, batch_of, check_close, logical, stack_of
from tests.support.ranks import Pools

shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=5)


def parameters_of(sizes: list[tuple[int, int]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in sizes]


@given(shapes)
def test_gradients_become_views_of_one_buffer(sizes: list[tuple[int, int]]) -> None:
    parameters = parameters_of(sizes)
    bucket = GradientBucket(parameters)
    bucket.flat.fill_(7.0)
    bucket.begin()
    assert not bucket.flat.any()
    for i, parameter in enumerate(parameters):
        (parameter.sum() * (i + 1)).backward()
    expected = [float(i + 1) for i, p in enumerate(parameters) for _ in range(p.numel())]
    assert bucket.flat.tolist() == expected
    bucket.flat.mul_(2)  # what a reduction does to the buffer, the gradients see
    for i, parameter in enumerate(parameters):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0 * (i + 1)))
    assert bucket.size_bytes == 4 * len(expected)


@given(shapes, st.integers(1, 60))
def test_chunks_cover_everything_once(sizes: list[tuple[int, int]], chunks: int) -> None:
    bucket = GradientBucket(parameters_of(sizes))
    for index in range(chunks):
        bucket.chunk(index, (1,) * chunks).add_(1)
    assert bucket.flat.eq(1).all()
    lengths = [bucket.chunk(index, (1,) * chunks).numel() for index in range(chunks)]
    assert sum(lengths) == bucket.flat.numel()
    assert max(lengths) - min(lengths) <= 1


@given(shapes, st.lists(st.integers(1, 10**9), min_size=1, max_size=6), st.sampled_from([4, 8]))
def test_parts_of_any_size_cover_everything_once(
    sizes: list[tuple[int, int]], parts: list[int], element_bytes: int
) -> None:
    """Parts are relative: given in bytes of float32, they hold for float64 as well."""
    dtype = torch.float32 if element_bytes == 4 else torch.float64
    bucket = GradientBucket([nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes])
    for index, part in enumerate(parts):
        piece = bucket.chunk(index, tuple(parts)).add_(1)
        assert abs(piece.numel() - bucket.flat.numel() * part / sum(parts)) < 1 + 1e-6
    assert bucket.flat.eq(1).all()


@given(shapes, st.integers(1, 3))
def test_gradients_from_before_are_added_after_the_reduction(
    sizes: list[tuple[int, int]], passes: int
) -> None:
    """`ranks` ranks with the same gradient: a pass is worth `ranks`, whatever was there."""
    ranks, parameters = 3, parameters_of(sizes)
    bucket = GradientBucket(parameters)
    for _ in range(passes):
        bucket.begin()
        for parameter in parameters:
            parameter.sum().backward()
        bucket.flat.mul_(ranks)
        bucket.finish()
    for parameter in parameters:
        assert parameter.grad is not None
        assert parameter.grad.eq(ranks * passes).all()


def test_a_parameter_without_a_gradient_gets_zeros() -> None:
    (parameter,) = parameters_of([(2, 2)])
    bucket = GradientBucket([parameter])
    bucket.begin()
    bucket.finish()
    assert parameter.grad is not None
    assert not parameter.grad.any()


def test_an_empty_bucket_holds_nothing() -> None:
    bucket = GradientBucket([])
    bucket.begin()
    bucket.finish()
    assert bucket.size_bytes == 0
    assert bucket.chunk(0, (1,)).numel() == 0


def test_mixed_types_are_refused() -> None:
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    with pytest.raises(ValueError, match=r"share type and device, found.*float32.*float64"):
        GradientBucket(mixed)


CASE = Case(
    world_size=2,
    ep_size=2,
    schedule=ScheduleConfig(name="flowmoe", microbatches=2, all_reduce_chunk_bytes=512),
    model=ModelConfig(num_layers=2, hidden_size=8, num_heads=2, seq_len=5, vocab_size=11),
    moe=MoEConfig(num_experts=4, moe_ffn_hidden_size=8, aux_loss_coeff=0.1),
    batch=3,
    double=True,
)


def accumulate(rank: int, case: Case, seeds: list[int]) -> dict[str, Tensor]:
    """Gradients after one backward pass per batch, without clearing them in between."""
    stack = stack_of(rank, replace(case, seed=0))
    mine = slice(rank * case.batch, (rank + 1) * case.batch)
    for seed in seeds:
        tokens, labels = batch_of(replace(case, seed=seed))
        stack(tokens[mine], labels[mine]).backward()
    found = {n: p.grad.clone() for n, p in stack.model.named_parameters() if p.grad is not None}
    return logical(stack, found)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_backward_passes_on_two_ranks_are_the_sum_of_separate_ones(ranks: Pools, ep_size: int) -> None:
    case = replace(CASE, ep_size=ep_size)
    both, first, second = (ranks(2).run(accumulate, case, seeds) for seeds in ([1, 2], [1], [2]))
    for rank in range(2):
        assert both[rank].keys() == first[rank].keys()
        for name, gradient in both[rank].items():
            check_close(gradient, first[rank][name] + second[rank][name], 1e-12, name)
            assert not torch.allclose(gradient, first[rank][name], rtol=1e-6)
