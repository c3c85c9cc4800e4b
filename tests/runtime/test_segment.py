"""Segments: gradients equal plain autograd, and memory holds only what operators save."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.runtime.handlers import PassThrough, Segment, anchor_on

ANCHOR = anchor_on(torch.device("cpu"))


def network(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Two inputs and a weight, two outputs, inputs used more than once."""
    x, y, weight = tensors
    first = torch.tanh(x @ weight) * y
    return first + x, (first * x).sum(-1).exp()


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_gradients_equal_plain_autograd(rows: int, width: int, seed: int, history: bool) -> None:
    """Of inputs and of parameters; whether the inputs come from a graph or not makes no difference."""
    values = [numbers(rows, width, seed=seed + i) for i in range(3)]
    weight = nn.Parameter(numbers(width, width, seed=seed + 5))
    out_grads = (values[2], numbers(rows, seed=seed + 7))

    plain = [v.clone().requires_grad_() for v in values[:2]]
    expected = network(*plain, weight)
    wanted = torch.autograd.grad(expected, [*plain, weight], out_grads)

    segment = Segment(ANCHOR)
    inputs = [v.clone().requires_grad_() * 1 if history else v.clone() for v in values[:2]]
    outputs = segment.leave(*network(*segment.enter(*inputs), weight))
    grads = segment.backward(out_grads)
    for ours, theirs in zip((*outputs, *grads, weight.grad), (*expected, *wanted), strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs.detach())
    assert not any(output.requires_grad for output in outputs)


def test_the_backward_of_a_segment_stops_at_its_inputs() -> None:
    source = numbers(3, seed=0).requires_grad_()
    segment = Segment(ANCHOR)
    (entered,) = segment.enter(source * 2)
    segment.leave(entered.sin())
    segment.backward([torch.ones(3, dtype=torch.float64)])
    assert source.grad is None


def test_parameter_gradients_are_accumulated() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 10.0)
    for _ in range(2):
        segment = Segment(ANCHOR)
        (x,) = segment.enter(torch.tensor([1.0, 2.0]))
        segment.leave(x * weight)
        segment.backward([torch.ones(2)])
    assert weight.grad.tolist() == [12.0, 14.0]


def test_an_input_that_is_not_used_has_no_gradient() -> None:
    segment = Segment(ANCHOR)
    used, _ = segment.enter(torch.ones(2), torch.ones(2))
    segment.leave(used * 3)
    grad, none = segment.backward([torch.ones(2)])
    assert none is None
    assert grad is not None
    assert grad.tolist() == [3.0, 3.0]


def test_a_segment_without_inputs_reaches_its_parameters() -> None:
    weight = nn.Parameter(torch.ones(3))
    segment = Segment(ANCHOR)
    assert segment.enter() == ()
    segment.leave(weight * 2)
    assert segment.backward([torch.ones(3)]) == []
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3


class _Watched(torch.autograd.Function):
    """x + weight, saves nothing; the memory of its output can be watched through `alive`."""

    alive: list[weakref.ref[Any]] = []  # noqa: RUF012  # one test's scratch

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        del ctx
        memory = x.numpy() + weight.detach().numpy()
        _Watched.alive.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        del ctx
        return grads[0], grads[0]


@pytest.mark.slow
@pytest.mark.parametrize("saves", [False, True])
def test_inputs_and_outputs_are_kept_only_by_operators_that_need_them(saves: bool) -> None:
    """A tensor over a NumPy array keeps it alive. A product saves its factors, a sum saves nothing."""
    _Watched.alive.clear()
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    memory = np.arange(4.0)
    of_input = weakref.ref(memory)
    segment = Segment(ANCHOR)
    entered = segment.enter(torch.from_numpy(memory))
    inside = entered[0] * weight if saves else entered[0]
    outputs = segment.leave(_Watched.apply(inside, weight))
    (of_output,) = _Watched.alive
    assert of_input() is not None
    assert of_output() is not None
    del memory, entered, inside, outputs
    gc.collect()
    assert (of_input() is not None) is saves
    assert of_output() is None
    (grad,) = segment.backward([torch.full((4,), 2.0, dtype=torch.float64)])
    assert grad is not None
    assert grad.tolist() == [2.0] * 4
    assert weight.grad is not None
    assert weight.grad.tolist() == ([2.0, 4.0, 6.0, 8.0] if saves else [2.0] * 4)
    gc.collect()
    assert of_input() is None


def test_pass_through_changes_nothing_and_has_no_backward() -> None:
    x = torch.ones(2)
    segment = PassThrough()
    assert segment.enter(x)[0] is x
    assert segment.leave(x)[0] is x
    with pytest.raises(RuntimeError, match="training mode"):
        segment.backward([x])
