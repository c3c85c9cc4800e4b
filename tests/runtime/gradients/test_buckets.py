"""Gradient buckets: views of one buffer, slices without gap or overlap, nothing reduced twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.runtime.buckets import FlatGradients, bucket_of
from tests.support.close import check_all_close
from tests.support.layouts import tiny_case
from tests.support.parity import Case, batch_of, gradients_of, logical, stack_of
from tests.support.ranks import Pools

shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=5)


def parameters_of(sizes: list[tuple[int, int]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in sizes]


def begun(parameters: list[nn.Parameter]) -> FlatGradients:
    flat = FlatGradients(parameters)
    flat.begin()
    return flat


@given(shapes)
def test_gradients_become_views_of_one_buffer(sizes: list[tuple[int, int]]) -> None:
    parameters = parameters_of(sizes)
    held = begun(parameters)
    assert not held.flat.any()
    for i, parameter in enumerate(parameters):
        (parameter.sum() * (i + 1)).backward()
    expected = [float(i + 1) for i, p in enumerate(parameters) for _ in range(p.numel())]
    assert held.flat.tolist() == expected
    held.flat.mul_(2)  # what a reduction does to the buffer, the gradients see
    for i, parameter in enumerate(parameters):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0 * (i + 1)))


@given(shapes, st.integers(1, 60))
def test_chunks_cover_everything_once(sizes: list[tuple[int, int]], chunks: int) -> None:
    held = begun(parameters_of(sizes))
    for index in range(chunks):
        held.piece(index, (1,) * chunks).add_(1)
    assert held.flat.eq(1).all()
    lengths = [held.piece(index, (1,) * chunks).numel() for index in range(chunks)]
    assert sum(lengths) == held.flat.numel()
    assert max(lengths) - min(lengths) <= 1


@given(shapes, st.lists(st.integers(1, 10**9), min_size=1, max_size=6), st.sampled_from([4, 8]))
def test_parts_of_any_size_cover_everything_once(
    sizes: list[tuple[int, int]], parts: list[int], element_bytes: int
) -> None:
    """Parts are relative: given in bytes of float32, they hold for float64 as well."""
    dtype = torch.float32 if element_bytes == 4 else torch.float64
    held = begun([nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes])
    for index, part in enumerate(parts):
        piece = held.piece(index, tuple(parts)).add_(1)
        assert abs(piece.numel() - held.flat.numel() * part / sum(parts)) < 1 + 1e-6
    assert held.flat.eq(1).all()


@given(shapes, st.integers(1, 3))
def test_gradients_from_before_are_added_to_in_place_after_the_reduction(
    sizes: list[tuple[int, int]], passes: int
) -> None:
    """`ranks` ranks with the same gradient: a pass is worth `ranks`, whatever was there."""
    ranks, parameters = 3, parameters_of(sizes)
    held, first = FlatGradients(parameters), None
    for _ in range(passes):
        held.begin()
        for parameter in parameters:
            parameter.sum().backward()
        held.piece(0, (1,)).mul_(ranks)
        assert held.finish() == []
        first = first or [parameter.grad for parameter in parameters]
    assert first is not None
    for parameter, gradient in zip(parameters, first, strict=True):
        assert parameter.grad is gradient
        assert gradient is not None
        assert gradient.eq(ranks * passes).all()


def test_a_parameter_without_a_gradient_gets_zeros_and_a_bucket_without_parameters_has_no_buffer() -> None:
    (parameter,) = parameters_of([(2, 2)])
    begun([parameter]).finish()
    assert parameter.grad is not None and not parameter.grad.any()
    assert bucket_of([]) == []


@given(shapes, st.integers(1, 5))
def test_mixed_types_have_a_buffer_each(sizes: list[tuple[int, int]], chunks: int) -> None:
    types = (torch.float32, torch.float64)
    mixed = [nn.Parameter(torch.ones(size, dtype=types[i % 2])) for i, size in enumerate(sizes)]
    bucket = bucket_of(mixed)
    assert len(bucket) == min(2, len(mixed))
    for flat in bucket:
        flat.begin()
        for index in range(chunks):
            flat.piece(index, (1,) * chunks).add_(1)
        assert flat.finish() == []
    for parameter in mixed:
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.eq(1).all()


# ---- who holds the memory ----------------------------------------------------------------------------------


def kept(parameter: nn.Parameter, how: str) -> Any:
    """A way to hold on to a gradient."""
    gradient = parameter.grad
    assert gradient is not None
    ways: dict[str, Callable[[], Any]] = {
        "itself": lambda: gradient,
        "detached": gradient.detach,
        "part": lambda: gradient[0],
        "numpy": gradient.numpy,
    }
    return ways[how]()


@pytest.mark.parametrize("how", ["itself", "detached", "part", "numpy"])
def test_a_gradient_that_somebody_keeps_is_not_overwritten(how: str) -> None:
    parameters = parameters_of([(2, 3), (1, 2)])
    bucket = begun(parameters)
    bucket.finish()
    held = kept(parameters[0], how)
    for parameter in parameters:
        parameter.grad = None
    bucket.begin()
    bucket.flat.fill_(5.0)
    bucket.finish()
    assert not held.any()


def test_memory_that_nobody_keeps_is_used_again() -> None:
    (parameter,) = parameters_of([(2, 3)])
    bucket, places = FlatGradients([parameter]), []
    for _ in range(3):
        bucket.begin()
        places.append(bucket.flat.data_ptr())
        bucket.finish()
        parameter.grad = None
    assert len(set(places)) == 1


def test_a_gradient_that_is_replaced_in_backward_is_told() -> None:
    first, second = parameters_of([(2, 3), (1, 2)])
    bucket = begun([first, second])
    second.grad = torch.ones_like(second)
    assert bucket.finish() == [second]


def test_a_parameter_converted_between_forward_and_backward_is_refused() -> None:
    (parameter,) = parameters_of([(2, 3)])
    bucket = FlatGradients([parameter])
    parameter.data = parameter.data.double()
    with pytest.raises(RuntimeError, match=r"was torch.float32 \[2, 3\] on cpu in the forward pass"):
        bucket.check()


CASE = tiny_case(2, all_reduce_chunk_bytes=512, aux_loss_coeff=0.1, batch=3, double=True)


def accumulate(rank: int, case: Case, seeds: list[int]) -> dict[str, Tensor]:
    """Gradients after one backward pass per batch, without clearing them in between."""
    stack = stack_of(rank, replace(case, seed=0))
    mine = slice(rank * case.batch, (rank + 1) * case.batch)
    for seed in seeds:
        tokens, labels = batch_of(replace(case, seed=seed))
        stack(tokens[mine], labels[mine]).backward()
    found = gradients_of(stack.model)
    return logical(stack, found)


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_backward_passes_on_two_ranks_are_the_sum_of_separate_ones(ranks: Pools, ep_size: int) -> None:
    case = replace(CASE, ep_size=ep_size)
    both, first, second = (ranks(2).run(accumulate, case, seeds) for seeds in ([1, 2], [1], [2]))
    for rank in range(2):
        check_all_close(both[rank], {n: g + second[rank][n] for n, g in first[rank].items()}, 1e-12)
        assert not any(torch.allclose(g, first[rank][n], rtol=1e-6) for n, g in both[rank].items())
