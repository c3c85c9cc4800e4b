"""The router: float32 whatever comes in, and weights that follow the probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.moe import MoEConfig
from penstock.moe.router import TopKRouter

HIDDEN, TOKENS = 6, 20


def router(dtype: torch.dtype = torch.float32, **settings: object) -> TopKRouter:
    config = MoEConfig(**({"num_experts": 5, "top_k": 2} | settings))  # type: ignore[arg-type]  # a test's table
    made = TopKRouter(HIDDEN, config).to(dtype)
    with torch.no_grad():
        made.gate.copy_(torch.randn(made.gate.shape, generator=torch.Generator().manual_seed(1)))
    return made


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize(("top_k", "renormalise"), [(1, False), (2, False), (2, True), (5, False), (5, True)])
def test_against_a_loop(top_k: int, renormalise: bool) -> None:
    made = router(torch.float64, top_k=top_k, norm_topk_prob=renormalise)
    x_TM = tokens(torch.float64)
    routing = made(x_TM)
    probability_E, z = torch.zeros(5, dtype=torch.float64), 0.0
    for t in range(TOKENS):
        logits = (made.gate.detach() @ x_TM[t]).tolist()
        total = sum(math.exp(logit) for logit in logits)
        shares = [math.exp(logit) / total for logit in logits]
        best = sorted(range(5), key=lambda e: -shares[e])[:top_k]
        scale = sum(shares[e] for e in best) if renormalise else 1.0
        assert routing.experts_Tk[t].tolist() == best
        assert routing.weights_Tk[t].tolist() == pytest.approx([shares[e] / scale for e in best])
        probability_E += torch.tensor(shares, dtype=torch.float64)
        z += math.log(total) ** 2
    torch.testing.assert_close(routing.probability_E, probability_E)
    assert routing.z.item() == pytest.approx(z, rel=1e-12)


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_float32_under_bfloat16(gate_dtype: torch.dtype, autocast: bool) -> None:
    """The result is that of float32 arithmetic on the rounded inputs, bit for bit, under autocast too."""
    made, x_TM = router(gate_dtype), tokens(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        routing = made(x_TM)
    precise = router()
    with torch.no_grad():
        precise.gate.copy_(made.gate)
    expected = precise(x_TM.float())
    assert routing.weights_Tk.dtype == routing.probability_E.dtype == routing.z.dtype == torch.float32
    assert torch.equal(routing.weights_Tk, expected.weights_Tk)
    assert torch.equal(routing.experts_Tk, expected.experts_Tk)
    assert torch.equal(routing.probability_E, expected.probability_E)
    assert torch.equal(routing.z, expected.z)
    # Rounded arithmetic gives something else, so the comparison above says something.
    rounded = (x_TM @ made.gate.bfloat16().t()).softmax(-1).topk(2).values
    assert not torch.allclose(rounded.float(), expected.weights_Tk, rtol=1e-4)


def test_float64_stays_float64() -> None:
    assert router(torch.float64)(tokens(torch.float64)).weights_Tk.dtype == torch.float64


def test_weights_sum_to_one_only_if_renormalised() -> None:
    ones = torch.ones(TOKENS)
    torch.testing.assert_close(router()(tokens()).weights_Tk.sum(-1), ones)
    assert (router(norm_topk_prob=False)(tokens()).weights_Tk.sum(-1) < 1).all()


@pytest.mark.parametrize("what", ["weights_Tk", "probability_E", "z"])
def test_the_gate_learns_from_every_output(what: str) -> None:
    made = router()
    value: Tensor = getattr(made(tokens()), what)
    (value * torch.arange(1, value.numel() + 1).view_as(value)).sum().backward()
    assert made.gate.grad is not None
    assert made.gate.grad.norm() > 0
