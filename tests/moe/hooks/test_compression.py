"""Compressed rows: bounds of what is lost, forward and backward, alone and inside a layer.

Shapes: T tokens, R rows, M hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.moe.experts import ModuleExperts
from penstock.moe.hooks import Bfloat16Rows, EncodedRows, Int8Rows
from penstock.moe.layer import MoELayer
from penstock.moe.permute.sort import SortPermutation
from penstock.moe.routers import SoftmaxRouter

HIDDEN, EXPERTS = 6, 3
HALF_STEP, HALF_DIGIT = 1 / 254, 2.0**-8
FLOAT32 = 1e-6
"""What float32 itself may add, relative to the largest number."""

MAKERS: dict[str, Callable[..., EncodedRows]] = {
    "bfloat16": Bfloat16Rows,
    "int8": lambda **options: Int8Rows(HIDDEN, **options),
}
both = pytest.mark.parametrize("kind", MAKERS)


def bound(kind: str, rows_RM: Tensor) -> Tensor:
    """The most by which a number of each row may move, [R, 1]."""
    relative = HALF_STEP if kind == "int8" else HALF_DIGIT
    return rows_RM.double().abs().amax(1, keepdim=True) * (relative + FLOAT32)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


number = st.floats(2.0**-40, 2.0**40, width=32).flatmap(lambda x: st.sampled_from([x, -x])) | st.just(0.0)
tables = st.integers(0, 4).flatmap(
    lambda rows: st.lists(number, min_size=2 * rows * HIDDEN, max_size=2 * rows * HIDDEN).map(
        lambda values: torch.tensor(values).view(2, -1, HIDDEN)
    )
)


@both
@given(tables)
def test_rows_and_gradients_move_by_no_more_than_the_bound(kind: str, drawn: Tensor) -> None:
    hook, (rows_RM, grad_RM) = MAKERS[kind](), drawn
    rows_RM.requires_grad_()
    for leave, arrive in (
        (hook.before_dispatch, hook.after_dispatch),
        (hook.before_combine, hook.after_combine),
    ):
        out_RM = arrive(leave(rows_RM))
        (found_RM,) = torch.autograd.grad(out_RM, rows_RM, grad_RM)
        for ours, exact in ((out_RM.detach(), rows_RM.detach()), (found_RM, grad_RM)):
            assert (ours.double() - exact.double()).abs().le(bound(kind, exact)).all()
            if kind == "bfloat16":  # every number by itself, not only against the largest
                assert (ours.double() - exact.double()).abs().le(exact.double().abs() * HALF_DIGIT).all()


@both
def test_a_gradient_is_encoded_where_it_leaves_and_decoded_where_it_arrives(kind: str) -> None:
    """The two halves run on different ranks, and gradients are handed over as they are."""
    hook, rows, grad = MAKERS[kind](), numbers(4, HIDDEN).requires_grad_(), numbers(4, HIDDEN, seed=1)
    leaving = hook.before_combine(rows)
    arriving = leaving.detach().requires_grad_()
    out = hook.after_combine(arriving)
    out.backward(grad)
    assert arriving.grad is not None
    under_way = arriving.grad
    wanted = hook.before_dispatch(grad)
    assert torch.equal(under_way.view(torch.int8), wanted.view(torch.int8))
    leaving.backward(under_way)
    assert rows.grad is not None
    assert torch.equal(rows.grad, hook.after_dispatch(wanted))


@both
def test_calls_under_way_do_not_know_of_each_other(kind: str) -> None:
    """Two microbatches of different types and sizes, an evaluation between them, backward in any order."""
    hook = MAKERS[kind]()
    batches = [numbers(3, HIDDEN, dtype=torch.float64), numbers(5, HIDDEN, seed=1)]
    grads = [numbers(3, HIDDEN, seed=2), numbers(5, HIDDEN, seed=3)]
    alone = []
    for batch, grad in zip(batches, grads, strict=True):
        rows = batch.clone().requires_grad_()
        hook.after_dispatch(hook.before_dispatch(rows)).backward(grad)
        alone.append(rows.grad)
    entered = [batch.clone().requires_grad_() for batch in batches]
    left = [hook.before_dispatch(rows) for rows in entered]
    with torch.no_grad():
        hook.after_dispatch(hook.before_dispatch(numbers(2, HIDDEN, seed=4, dtype=torch.bfloat16)))
    arrived = [hook.after_dispatch(rows) for rows in left]
    for i in (1, 0):
        arrived[i].backward(grads[i])
    for rows, wanted in zip(entered, alone, strict=True):
        assert rows.grad is not None
        assert wanted is not None
        assert rows.grad.dtype == rows.dtype
        assert torch.equal(rows.grad, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_travel_as_they_are(dtype: torch.dtype) -> None:
    hook, rows = Bfloat16Rows().to(dtype), numbers(3, HIDDEN).to(dtype)
    assert hook.before_dispatch(rows) is rows
    assert hook.after_dispatch(rows) is rows


@both
@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16])
def test_decoded_rows_have_the_models_type(kind: str, precision: torch.dtype) -> None:
    hook, rows = MAKERS[kind]().to(precision), numbers(3, HIDDEN, dtype=precision).requires_grad_()
    out = hook.after_dispatch(hook.before_dispatch(rows))
    out.sum().backward()
    assert out.dtype == precision
    assert rows.grad is not None
    assert rows.grad.dtype == precision


@both
def test_under_autocast_decoded_rows_have_its_type(kind: str) -> None:
    hook = MAKERS[kind]()
    for dtype in (torch.float32, torch.bfloat16):
        rows = numbers(3, HIDDEN).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = hook.after_combine(hook.before_combine(rows))
        out.sum().backward()  # outside, as the engine does
        assert out.dtype == torch.bfloat16
        assert rows.grad is not None
        assert rows.grad.dtype == dtype


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_size=8\) met rows of 6 numbers"):
        Int8Rows(8).before_dispatch(numbers(2, 6))


def layer_of(*hooks: EncodedRows) -> MoELayer:
    """Two linear experts of three get every token, with weight a half each."""
    experts = ModuleExperts(lambda: nn.Linear(HIDDEN, HIDDEN, bias=False), EXPERTS)
    gate = SoftmaxRouter(HIDDEN, EXPERTS, 2)
    layer = MoELayer(gate=gate, permutation=SortPermutation(EXPERTS), expert=experts, hooks=hooks)
    with torch.no_grad():
        gate.weight.zero_()
        for i, parameter in enumerate(experts.parameters()):
            parameter.copy_(numbers(HIDDEN, HIDDEN, seed=10 + i))
    return layer


@both
def test_expert_gradients_are_those_of_the_decoded_rows(kind: str) -> None:
    hook, x_TM, grad_TM = MAKERS[kind](), numbers(7, HIDDEN), numbers(7, HIDDEN, seed=1)
    layer = layer_of(hook)
    layer(x_TM).backward(grad_TM)
    seen_TM = hook.after_dispatch(hook.before_dispatch(x_TM))
    met_TM = hook.after_dispatch(hook.before_dispatch(grad_TM / 2))
    used = [p.grad for p in layer.experts.parameters() if p.grad is not None]
    assert len(used) == 2
    for grad in used:
        torch.testing.assert_close(grad, met_TM.t() @ seen_TM)
