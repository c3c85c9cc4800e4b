"""Experts: products over groups of rows against a loop, and the two block orders."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe import MoEConfig
from penstock.moe.config import ExpertKind
from penstock.moe.experts import build_experts, by_expert, by_source, grouped_product

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}

SIZES = {
    "equal": (3, 3, 3),
    "one expert": (5,),
    "uneven": (4, 1, 2),
    "some empty": (0, 6, 0),
    "the last one empty": (2, 3, 0),
    "all empty": (0, 0, 0),
}


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def check_product(sizes: tuple[int, ...], width: int, out: int, dtype: torch.dtype) -> None:
    """Values and both gradients against one product per expert in float64."""
    rows = numbers(sum(sizes), width, dtype=dtype).requires_grad_()
    weight = numbers(len(sizes), width, out, dtype=dtype, seed=1).requires_grad_()
    gradient = numbers(sum(sizes), out, dtype=dtype, seed=2)
    product = grouped_product(rows, weight, sizes)
    found = (product, *torch.autograd.grad(product, (rows, weight), gradient))
    exact_rows, exact_weight = (t.detach().double().requires_grad_() for t in (rows, weight))
    parts = exact_rows.split(list(sizes))
    exact = torch.cat([part @ matrix for part, matrix in zip(parts, exact_weight, strict=True)])
    wanted = (exact, *torch.autograd.grad(exact, (exact_rows, exact_weight), gradient.double()))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        assert ours.shape == theirs.shape
        difference, size = float((ours.double() - theirs).detach().norm()), float(theirs.detach().norm())
        assert difference <= TOLERANCE[dtype] * max(size, 1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_grouped_product_equals_a_loop(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    check_product(sizes, 16, 24, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("width", "out"), [(6, 16), (16, 6), (3, 5)])
def test_grouped_product_takes_any_width(width: int, out: int, dtype: torch.dtype) -> None:
    """Sizes that are no multiple of 16 bytes are valid settings, too."""
    check_product((4, 1, 2), width, out, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_experts_equal_their_formula(kind: ExpertKind, dtype: torch.dtype) -> None:
    experts = build_experts(8, MoEConfig(expert=kind, moe_ffn_hidden_size=16), 3)
    with torch.no_grad():
        for i, parameter in enumerate(experts.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=i))
    sizes = (2, 0, 3)
    rows = numbers(5, 8, dtype=dtype, seed=9)
    weights = {name: p.detach().to(dtype).double() for name, p in experts.named_parameters()}
    expected = []
    for row, e in zip(rows.double(), (0, 0, 2, 2, 2), strict=True):
        up = row @ weights["w_up"][e]
        hidden = F.silu(row @ weights["w_gate"][e]) * up if kind == "swiglu" else F.gelu(up)
        expected.append(hidden @ weights["w_down"][e])
    out = experts.to(torch.float64 if dtype == torch.float64 else torch.float32)(rows, sizes)
    exact = torch.stack(expected)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= 2 * TOLERANCE[dtype] * exact.norm()


tables = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(0, 3), min_size=width, max_size=width), min_size=1, max_size=4
    )
)


@given(tables)
def test_by_expert_sorts_by_expert_then_source(received: list[list[int]]) -> None:
    labels = [
        (source, expert, i)
        for source, row in enumerate(received)
        for expert, size in enumerate(row)
        for i in range(size)
    ]
    rows = torch.tensor(labels).view(-1, 3)
    ordered = by_expert(rows, received)
    wanted = sorted(labels, key=lambda label: (label[1], label[0], label[2]))
    assert [tuple(row) for row in ordered.tolist()] == wanted
    assert torch.equal(by_source(ordered, received), rows)
