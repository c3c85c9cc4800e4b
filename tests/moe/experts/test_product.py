"""Products over groups of rows against a loop over rows, both ways that they may take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from penstock.moe.products import grouped_product, weight_gradient
from tests.moe.experts.plain import SIZES, TOLERANCE, TYPES, WAYS, by_loop, check_close, numbers, take

every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
every_type = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
every_way = pytest.mark.parametrize("way", WAYS)


def check_product(
    sizes: tuple[int, ...], width: int, out: int, dtype: torch.dtype, weight_dtype: torch.dtype | None = None
) -> None:
    """Values, both gradients and their types."""
    rows = numbers(sum(sizes), width, dtype=dtype).requires_grad_()
    weight = numbers(len(sizes), width, out, dtype=weight_dtype or dtype, seed=1).requires_grad_()
    gradient = numbers(sum(sizes), out, dtype=dtype, seed=2)
    with torch.autocast("cpu", enabled=False):
        product = grouped_product(rows, weight, sizes)
    found = (product, *torch.autograd.grad(product, (rows, weight), gradient))
    wanted = by_loop(rows.detach(), weight.detach(), sizes, gradient)
    for ours, theirs, owner in zip(found, wanted, (rows, rows, weight), strict=True):
        assert ours.dtype == owner.dtype
        check_close(ours, theirs, TOLERANCE[dtype])


@every_way
@pytest.mark.parametrize("types", TYPES, ids=str)
@every_size
def test_equals_a_loop(
    sizes: tuple[int, ...],
    types: tuple[torch.dtype, torch.dtype],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take(way, monkeypatch)
    check_product(sizes, 16, 24, *types)


@every_way
@every_type
@pytest.mark.parametrize(("width", "out"), [(6, 16), (16, 6), (3, 5)])
def test_takes_any_width(
    width: int, out: int, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that are no multiple of 16 bytes are valid settings, too."""
    take(way, monkeypatch)
    check_product((4, 1, 2), width, out, dtype)


@every_way
def test_a_gradient_may_be_a_broadcast_number(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(way, monkeypatch)
    rows = numbers(7, 16, dtype=torch.float32).requires_grad_()
    weight = numbers(3, 16, 24, dtype=torch.float32, seed=1).requires_grad_()
    grouped_product(rows, weight, (4, 1, 2)).sum().backward()
    wanted = by_loop(rows.detach(), weight.detach(), (4, 1, 2), torch.ones(7, 24))
    for variable, theirs in zip((rows, weight), wanted[1:], strict=True):
        assert variable.grad is not None
        check_close(variable.grad, theirs, TOLERANCE[torch.float32])


@every_way
@pytest.mark.parametrize("frozen", ["rows", "weight"])
def test_either_may_be_frozen(way: str, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(way, monkeypatch)
    rows = numbers(7, 16, dtype=torch.float32).requires_grad_(frozen != "rows")
    weight = numbers(3, 16, 24, dtype=torch.float32, seed=1).requires_grad_(frozen != "weight")
    grouped_product(rows, weight, (4, 1, 2)).sum().backward()
    assert (rows.grad is None, weight.grad is None) == (frozen == "rows", frozen == "weight")


@every_way
@pytest.mark.parametrize("sizes", [(3, 3), (4, 2)])
def test_autocast_decides_the_type_whatever_the_sizes(
    sizes: tuple[int, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(way, monkeypatch)
    weight = numbers(2, 16, 24, dtype=torch.float32, seed=1).requires_grad_()
    for dtype, wanted in ((torch.float32, torch.bfloat16), (torch.float64, torch.float64)):
        rows = numbers(6, 16, dtype=dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = grouped_product(rows, weight, sizes)
        out.sum().backward()
        assert out.dtype == wanted
        assert rows.grad is not None
        assert rows.grad.dtype == dtype
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@every_size
def test_gradients_have_the_precision_of_the_product_though_backward_runs_under_autocast(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the thread of a device autocast then has a type of nobody's choice."""
    take("expert by expert", monkeypatch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_product(sizes, 16, 24, torch.float32)


@every_way
@every_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_weight_gradients_are_written_or_added(
    sizes: tuple[int, ...], dtype: torch.dtype, add: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(way, monkeypatch)
    rows, gradient = numbers(sum(sizes), 16, dtype=dtype), numbers(sum(sizes), 24, dtype=dtype, seed=1)
    before = numbers(len(sizes), 16, 24, dtype=torch.float32, seed=2)
    _, _, made = by_loop(rows, before, sizes, gradient)
    total: Tensor = before.clone() if add else torch.full_like(before, torch.nan)
    weight_gradient(rows, gradient, sizes, total, add=add)
    check_close(total, before.double() + made if add else made, TOLERANCE[dtype])


def test_a_gradient_lies_as_its_weight_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd copies others before it keeps them: as much again as all experts of a rank."""
    take("expert by expert", monkeypatch)
    weight = numbers(2, 24, 16, dtype=torch.float32).transpose(1, 2).requires_grad_()
    out = grouped_product(numbers(3, 16, dtype=torch.float32, seed=1), weight, (2, 1))
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert grad.stride() == weight.stride()


def one_by_one(rows: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    parts = zip(rows.split(list(sizes)), weight, strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


@pytest.mark.parametrize("squared", [False, True])
@every_way
def test_a_second_derivative_is_that_of_a_loop(
    way: str, squared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the gradient that arrives is a constant."""
    take(way, monkeypatch)
    sizes, found = (4, 0, 3), []
    for product in (grouped_product, one_by_one):
        rows = numbers(7, 16, dtype=torch.float32).requires_grad_()
        weight = numbers(3, 16, 24, dtype=torch.float32, seed=1).requires_grad_()
        out = product(rows, weight, sizes)
        total = out.square().sum() if squared else out.sum()
        grads = torch.autograd.grad(total, (rows, weight), create_graph=True)
        penalty = torch.stack([grad.square().sum() for grad in grads]).sum()
        found.append(torch.autograd.grad(penalty, (rows, weight)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
