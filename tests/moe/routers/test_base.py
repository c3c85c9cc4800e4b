"""What all gates have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.moe.gates import CosineRouter, ExpertChoiceRouter, NoisyRouter, SigmoidRouter, SoftRouter
from penstock.moe.routers import (
    Router,
    SampleKeys,
    SoftmaxRouter,
    TokenChoice,
    TokenRouter,
    Tokens,
)
from tests.moe.routers.plain import parts

HIDDEN, EXPERTS, SAMPLES, LENGTH = 8, 4, 3, 5
GATES: dict[str, Callable[[], Router]] = {
    "softmax": lambda: SoftmaxRouter(HIDDEN, EXPERTS, 2),
    "noisy": lambda: NoisyRouter(HIDDEN, EXPERTS, 2, place=1),
    "sigmoid": lambda: SigmoidRouter(HIDDEN, EXPERTS, 2),
    "cosine": lambda: CosineRouter(HIDDEN, EXPERTS, 2, proj_size=4),
    "expert_choice": lambda: ExpertChoiceRouter(HIDDEN, EXPERTS, top_k=2),
    "soft": lambda: SoftRouter(HIDDEN, EXPERTS, slots_per_expert=2),
}
TOKEN_GATES = ["softmax", "noisy", "sigmoid", "cosine"]


class CountingGate(TokenRouter):
    """A user's own gate: the first number of a token says which experts it likes."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__(num_experts, top_k)
        self.slope = nn.Parameter(torch.tensor(1.0))

    def logits(self, x_TM: Tensor, tokens: Tokens) -> Tensor:
        del tokens
        return -self.slope * (x_TM[:, :1] - torch.arange(self.num_experts)).abs()


def build(name: str, dtype: torch.dtype = torch.float32) -> Router:
    made, generator = GATES[name](), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made.to(dtype)


def states(dtype: torch.dtype = torch.float32) -> Tensor:
    x_TM = torch.randn(SAMPLES * LENGTH, HIDDEN, generator=torch.Generator().manual_seed(2))
    return x_TM.to(dtype)


def tokens(valid_T: Tensor | None = None) -> Tokens:
    return Tokens(samples=SAMPLES, keys=SampleKeys(0, torch.arange(SAMPLES)), valid_T=valid_T)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_float32_under_bfloat16(name: str, gate_dtype: torch.dtype, autocast: bool) -> None:
    """The decision is that of float32 arithmetic on the rounded inputs, bit for bit, under autocast too."""
    made, x_TM = build(name, gate_dtype), states(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = parts(made(x_TM, tokens()))
    expected = parts(made.float()(x_TM.float(), tokens()))
    for left, right in zip(found, expected, strict=True):
        assert left.dtype in (torch.float32, torch.int64)
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", GATES)
def test_float64_stays_float64(name: str) -> None:
    for value in parts(build(name, torch.float64)(states(torch.float64), tokens())):
        assert value.dtype in (torch.float64, torch.int64)


@pytest.mark.parametrize("name", GATES)
def test_gradients_reach_every_parameter_and_the_input(name: str) -> None:
    made, x_TM = build(name), states().requires_grad_()
    choice = made(x_TM, tokens())
    (choice.weights * torch.rand_like(choice.weights)).sum().backward()
    for tensor in (x_TM, *made.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.norm() > 0


@pytest.mark.parametrize("name", TOKEN_GATES)
def test_what_padding_holds_changes_nothing(name: str) -> None:
    made, valid_T = build(name), torch.arange(SAMPLES * LENGTH) % LENGTH < 3
    other_TM = torch.where(valid_T.unsqueeze(1), states(), 100.0)
    first, second = made(states(), tokens(valid_T)), made(other_TM, tokens(valid_T))
    assert isinstance(first, TokenChoice)
    assert isinstance(second, TokenChoice)
    assert first.masked
    assert (first.experts_Tk[~valid_T] == -1).all()
    assert (first.experts_Tk[valid_T] >= 0).all()
    assert torch.equal(first.experts_Tk, second.experts_Tk)
    assert torch.equal(first.weights[valid_T], second.weights[valid_T])
    assert first.sums.chosen_BE.sum(1).tolist() == [3 * 2] * SAMPLES
    torch.testing.assert_close(first.sums.probability_BE.sum(1), torch.full((SAMPLES,), 3.0))
    for value in ("chosen_BE", "probability_BE", "z"):
        assert torch.equal(getattr(first.sums, value), getattr(second.sums, value))


@pytest.mark.parametrize("name", ["expert_choice", "soft"])
def test_what_padding_holds_changes_nothing_where_tokens_do_not_choose(name: str) -> None:
    made, valid_T = build(name), torch.arange(SAMPLES * LENGTH) % LENGTH < 3
    other_TM = torch.where(valid_T.unsqueeze(1), states(), 100.0)
    first, second = made(states(), tokens(valid_T)), made(other_TM, tokens(valid_T))
    for left, right in zip(parts(first), parts(second), strict=True):
        torch.testing.assert_close(left, right)


def test_a_gate_of_ones_own() -> None:
    made = CountingGate(5, 2)
    x_TM = torch.tensor([[0.2], [3.9], [2.4]])
    choice = made(x_TM, Tokens())
    assert choice.experts_Tk.tolist() == [[0, 1], [4, 3], [2, 3]]
    near, far = torch.tensor([-0.2, -0.8]).exp()
    torch.testing.assert_close(choice.weights[0], torch.stack([near, far]) / (near + far))
    assert choice.sums.chosen_BE.tolist() == [[1, 1, 1, 2, 1]]
    choice.weights[:, 0].sum().backward()
    assert made.slope.grad is not None
    assert made.slope.grad != 0


@pytest.mark.parametrize("top_k", [0, 6])
def test_a_token_cannot_choose_that_many(top_k: int) -> None:
    with pytest.raises(ValueError, match=r"1 to num_experts \(5\)"):
        CountingGate(5, top_k)


def test_scale_and_renormalisation_are_of_weights_only() -> None:
    x_TM = states()
    plain = SoftmaxRouter(HIDDEN, EXPERTS, 2, renormalise=False)
    scaled = SoftmaxRouter(HIDDEN, EXPERTS, 2, renormalise=True, scale=2.5)
    scaled.weight.data = plain.weight.data
    left, right = plain(x_TM, Tokens()), scaled(x_TM, Tokens())
    torch.testing.assert_close(right.weights, left.weights / left.weights.sum(1, keepdim=True) * 2.5)
    assert torch.equal(left.sums.probability_BE, right.sums.probability_BE)
