"""Weight gradients made at once or put off equal autograd's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.device import using
from penstock.families.experts import Biased
from penstock.moe.products import AutogradWeights, ComputeCopies, WeightGradients, grouped_product
from tests.moe.experts.plain import SIZES, TOLERANCE, TYPES, WAYS, check_close, numbers, take
from tests.support.card import CardDevice, install
from tests.support.casts import Casts
from tests.support.ranks import Pools

Store = AutogradWeights | WeightGradients


MAKERS: dict[str, Callable[[], Store]] = {
    "autograd": AutogradWeights,
    "deferred": WeightGradients,
    "autograd with copies": lambda: AutogradWeights(ComputeCopies()),
    "deferred with copies": lambda: WeightGradients(copies=ComputeCopies()),
}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
every_way = pytest.mark.parametrize("way", WAYS)


def variables(sizes: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = numbers(sum(sizes), 16, dtype=dtype).requires_grad_()
    return rows, nn.Parameter(numbers(len(sizes), 16, 24, dtype=weight_dtype, seed=1))


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@both
@every_way
@every_size
@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_equal_autograd(
    make: Callable[[], Store],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two microbatches, in backward in the other order, and gradients that were there before."""
    take(way, monkeypatch)
    rows, weight = variables(sizes, dtype, weight_dtype)
    wanted_rows, wanted_weight = (tensor.detach().clone().requires_grad_() for tensor in (rows, weight))
    grads = [numbers(sum(sizes), 24, dtype=dtype, seed=2 + i) for i in range(2)]
    for grad in grads:
        grouped_product(wanted_rows, wanted_weight, sizes).backward(grad)
    stores = [make(), make()]
    outputs = [store.product(rows, weight, sizes) for store in stores]
    torch.testing.assert_close(outputs[0], grouped_product(rows, weight, sizes))
    for i in (1, 0):
        outputs[i].backward(grads[i])
    for store in stores:
        store.compute()
    check_close(gradient(rows), gradient(wanted_rows).double(), TOLERANCE[dtype])
    check_close(gradient(weight), gradient(wanted_weight).double(), TOLERANCE[dtype])
    assert gradient(weight).dtype == weight_dtype


def test_what_is_put_off_is_made_once_and_when_asked() -> None:
    rows, weight = variables((4, 1, 2), torch.float64, torch.float64)
    store = WeightGradients()
    store.product(rows, weight, (4, 1, 2)).sum().backward()
    assert rows.grad is not None
    assert weight.grad is None
    store.compute()
    once = gradient(weight).clone()
    store.compute()
    assert torch.equal(gradient(weight), once)


@both
def test_a_gradient_has_the_type_that_its_weight_asks_for(make: Callable[[], Store]) -> None:
    """The sum over slices is then wider than a bfloat16 weight."""
    rows, weight = variables((4, 1, 2), torch.bfloat16, torch.bfloat16)
    weight.grad_dtype, grad, store = torch.float32, numbers(7, 24, dtype=torch.bfloat16), make()
    products = [store.product(rows, weight, (4, 1, 2)) for _ in range(2)]
    for product in products:
        product.backward(grad)
    store.compute()
    once = variables((4, 1, 2), torch.bfloat16, torch.bfloat16)[1]
    grouped_product(rows, once, (4, 1, 2)).backward(grad)
    assert torch.equal(gradient(weight), 2 * gradient(once).float())


@both
def test_a_gradient_that_is_there_is_added_to_in_place(make: Callable[[], Store]) -> None:
    """Buckets reduce the memory that they once gave to `grad`."""
    rows, weight = variables((4, 1, 2), torch.float32, torch.float32)
    weight.grad = bucket = torch.ones_like(weight)
    store = make()
    store.product(rows, weight, (4, 1, 2)).sum().backward()
    store.compute()
    assert weight.grad is bucket
    expected = torch.autograd.grad(grouped_product(rows, weight, (4, 1, 2)).sum(), weight)[0]
    torch.testing.assert_close(bucket, expected + 1)


@both
def test_what_is_no_plain_parameter_is_left_to_autograd(make: Callable[[], Store]) -> None:
    """A weight that is computed, one with a hook, a frozen one."""
    sizes = (4, 1, 2)
    rows, weight = variables(sizes, torch.float64, torch.float64)
    wanted = torch.autograd.grad(grouped_product(rows, weight, sizes).sum(), weight)[0]
    store = make()
    store.product(rows, weight * 2, sizes).sum().backward()
    store.compute()
    torch.testing.assert_close(gradient(weight), wanted * 2)
    weight.grad = None
    weight.register_hook(lambda grad: grad * 3)
    store.product(rows, weight, sizes).sum().backward()
    store.compute()
    torch.testing.assert_close(gradient(weight), wanted * 3)
    frozen = weight.detach()
    rows.grad = None
    store.product(rows, frozen, sizes).sum().backward()
    store.compute()
    assert frozen.grad is None
    torch.testing.assert_close(gradient(rows)[0], frozen[0].sum(1))


@both
@pytest.mark.parametrize("turned", [False, True])
def test_hooks_put_on_after_forward_see_the_gradient(make: Callable[[], Store], turned: bool) -> None:
    sizes = (4, 1, 2)
    rows, weight = variables(sizes, torch.float64, torch.float64)
    wanted = torch.autograd.grad(grouped_product(rows, weight, sizes).sum(), weight)[0]
    parameter = nn.Parameter(weight.detach().transpose(1, 2).contiguous()) if turned else weight
    wanted = wanted.transpose(1, 2) if turned else wanted
    store = make()
    out = store.product(rows, parameter.transpose(1, 2) if turned else parameter, sizes)
    seen: list[Tensor] = []
    parameter.register_hook(lambda grad: grad * 3)
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(gradient(p).clone()))
    out.sum().backward()
    store.compute()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], wanted * 3)
    torch.testing.assert_close(gradient(parameter), wanted * 3)


@pytest.mark.parametrize("turned", [False, True])
def test_slices_of_a_step_share_one_copy_of_a_weight(turned: bool) -> None:
    """Forward and backward of all slices cast a weight once; a changed weight is cast again."""
    copies, sizes = ComputeCopies(), (4, 1, 2)
    rows, weight = variables(sizes, torch.bfloat16, torch.float32)
    parameter = nn.Parameter(weight.detach().transpose(1, 2).contiguous()) if turned else weight
    seen = parameter.transpose(1, 2) if turned else parameter
    with Casts(parameter) as casts:
        for _ in range(3):
            AutogradWeights(copies).product(rows, seen, sizes).sum().backward()
            deferred = WeightGradients(copies=copies)
            deferred.product(rows, seen, sizes).sum().backward()
            deferred.compute()
    assert casts.count == 1
    with torch.no_grad():
        parameter.mul_(2)
    with Casts(parameter) as casts:
        AutogradWeights(copies).product(rows, seen, sizes)
    assert casts.count == 1


def test_a_frozen_weight_is_copied_once_too() -> None:
    copies, sizes = ComputeCopies(), (4, 1, 2)
    rows, weight = variables(sizes, torch.bfloat16, torch.float32)
    weight.requires_grad_(False)
    with Casts(weight) as casts:
        for _ in range(2):
            AutogradWeights(copies).product(rows, weight, sizes).sum().backward()
    assert casts.count == 1
    assert weight.grad is None


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_computed_for_a_product_gets_no_copy_of_another(grad: bool) -> None:
    """Adapters, parametrizations and experts kept flat make weights anew, where the last ones were."""
    copies, sizes = ComputeCopies(), (4, 1, 2)
    rows, _ = variables(sizes, torch.bfloat16, torch.float32)
    for seed in range(20):
        flat = nn.Parameter(numbers(3 * 16, 24, dtype=torch.float32, seed=seed), requires_grad=False)
        with torch.set_grad_enabled(grad):
            for make in (lambda of: of.unflatten(0, (3, 16)), lambda of: of.reshape(3, 16, 24) * 2):
                found = AutogradWeights(copies).product(rows, make(flat), sizes)
                torch.testing.assert_close(found, grouped_product(rows, make(flat), sizes))


def by_device(rank: int, sizes: tuple[int, ...], bias: bool) -> list[Tensor]:
    """The gradients that autograd makes of a weight, or of a bias, on a GPU and on a processor."""
    del rank
    rows, weight = (each.detach() for each in variables(sizes, torch.bfloat16, torch.bfloat16))
    rows, factor = (rows @ weight[0], weight[:, 0]) if bias else (rows, weight)
    found = []
    with using(CardDevice(kernel=True)):
        for device in (install(), torch.device("cpu")):
            there = factor.to(device).requires_grad_()
            product = Biased.apply if bias else grouped_product
            product(rows.to(device), there, sizes).sum().backward()
            found.append(gradient(there).cpu())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@every_size
def test_experts_without_rows_have_zeros_whatever_a_kernel_leaves(
    sizes: tuple[int, ...], bias: bool, cards: Pools
) -> None:
    found, wanted = cards(1).run(by_device, sizes, bias)[0]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@every_size
def test_a_bias_is_added_to_the_rows_of_its_expert(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, bias = numbers(sum(sizes), 24, dtype=dtype), numbers(len(sizes), 24, dtype=dtype, seed=1)
    found, wanted = ((rows.clone().requires_grad_(), bias.clone().requires_grad_()) for _ in range(2))
    out = Biased.apply(*found, sizes)
    expected = wanted[0] + wanted[1].repeat_interleave(torch.tensor(sizes), dim=0)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(found, wanted, strict=True):
        check_close(gradient(one), gradient(other).double(), TOLERANCE[dtype])


def test_a_frozen_bias_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object, **more: object) -> None:
        raise AssertionError(given, more)

    monkeypatch.setattr("penstock.families.experts.weight_gradient", never)
    rows = numbers(7, 24).requires_grad_()
    Biased.apply(rows, numbers(3, 24, seed=1), (4, 1, 2)).sum().backward()
    assert torch.equal(gradient(rows), torch.ones_like(rows))
