"""Feed-forward experts against their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from penstock.moe.experts import Experts, GeluExperts, SharedExpert, SwiGLUExperts
from tests.moe.experts.plain import TOLERANCE, numbers

KINDS: dict[str, type[GeluExperts | SwiGLUExperts]] = {"gelu": GeluExperts, "swiglu": SwiGLUExperts}


def experts_of(kind: str, count: int = 3) -> Experts:
    experts = KINDS[kind](8, 16, count)
    with torch.no_grad():
        for i, parameter in enumerate(experts.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=i))
    return experts


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_their_formula(kind: str, dtype: torch.dtype) -> None:
    experts = experts_of(kind)
    rows = numbers(5, 8, dtype=dtype, seed=9)
    weights = {name: p.detach().to(dtype).double() for name, p in experts.named_parameters()}
    expected = []
    for row, e in zip(rows.double(), (0, 0, 2, 2, 2), strict=True):
        up = row @ weights["w_up"][e]
        hidden = F.silu(row @ weights["w_gate"][e]) * up if kind == "swiglu" else F.gelu(up)
        expected.append(hidden @ weights["w_down"][e])
    out = experts.to(torch.float64 if dtype == torch.float64 else torch.float32)(rows, (2, 0, 3))
    exact = torch.stack(expected)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= 2 * TOLERANCE[dtype] * exact.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_split_gives_a_view_for_every_expert(kind: str) -> None:
    experts = experts_of(kind)
    for name, parameter in experts.named_parameters(prefix="model.layers.0.mlp.experts"):
        pieces = list(experts.split(name, parameter.data))
        assert [(piece_name, number) for piece_name, number, _ in pieces] == [(name, e) for e in range(3)]
        for _, number, view in pieces:
            view.fill_(number)
            assert (parameter[number] == number).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_expert_sees_every_token(kind: str) -> None:
    expert, tokens = experts_of(kind, 1), numbers(5, 8, dtype=torch.float32)
    out = SharedExpert(expert)(tokens)
    torch.testing.assert_close(out, torch.cat([expert(token.unsqueeze(0), [1]) for token in tokens]))


def test_what_is_built_on_meta_stays_there() -> None:
    with torch.device("meta"):
        assert all(p.is_meta for p in SwiGLUExperts(8, 16, 2).parameters())
