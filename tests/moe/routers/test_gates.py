"""Gates where tokens choose, against loops; and what all gates have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from penstock.moe.gates import (
    FIRST_PLACE,
    INITIAL_TEMPERATURE,
    CosineRouter,
    ExpertChoiceRouter,
    NoisyRouter,
    SigmoidRouter,
    SoftRouter,
    normal,
)
from penstock.moe.routers import Router, SampleKeys, SoftmaxRouter, Tokens
from tests.moe.routers.plain import (
    HIDDEN,
    Case,
    Row,
    cases,
    check_token_choice,
    decide,
    dot,
    length,
    parts,
    softmax,
)
from tests.support.draws import draws

# ---- against loops -----------------------------------------------------------------------------------------

Logits = Callable[[Any, Tensor, Case], list[Row]]
PLACE = 4


def linear(made: Any, x_TM: Tensor, case: Case) -> list[Row]:
    del case
    return [[dot(weight, x) for weight in made.weight] for x in x_TM]


def cosine(made: CosineRouter, x_TM: Tensor, case: Case) -> list[Row]:
    del case
    low = [torch.stack([dot(row, x) for row in made.projection]) for x in x_TM]
    cosines = [[dot(x, e) / (length(x) * length(e)) for e in made.weight] for x in low]
    return [[each / made.log_temperature.exp() for each in row] for row in cosines]


def noisy(made: NoisyRouter, x_TM: Tensor, case: Case) -> list[Row]:
    keys = case.tokens.keys
    assert keys is not None
    shape = torch.Size((case.samples, case.length, case.num_experts))
    noise_TE = normal(shape, FIRST_PLACE + PLACE, keys).flatten(0, 1)
    spread = [[(1 + dot(weight, x).exp()).log() for weight in made.noise_weight] for x in x_TM]
    clean = linear(made, x_TM, case)
    return [
        [logit + noise * by for logit, noise, by in zip(*row, strict=True)]
        for row in zip(clean, noise_TE, spread, strict=True)
    ]


def sigmoids(row: Row) -> Row:
    return [1 / (1 + (-value).exp()) for value in row]


GATES: dict[str, tuple[Callable[..., Router], Logits, Callable[[Row], Row]]] = {
    "softmax": (SoftmaxRouter, linear, softmax),
    "sigmoid": (SigmoidRouter, linear, sigmoids),
    "cosine": (partial(CosineRouter, proj_size=3), cosine, softmax),
    "noisy": (partial(NoisyRouter, place=PLACE), noisy, softmax),
    "noisy, in evaluation": (lambda *sizes, **more: NoisyRouter(*sizes, **more).eval(), linear, softmax),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", GATES)
@draws(30)
@given(drawn=cases())
def test_against_loops(name: str, padded: bool, drawn: Case) -> None:
    (make, logits, scores), case = GATES[name], replace(drawn, padded=padded)
    made = case.fill(make(HIDDEN, case.num_experts, case.top_k, **case.options))
    x_TM = case.x()
    check_token_choice(case, made, x_TM, decide(case, logits(made, x_TM, case), scores=scores))


# ---- float32, whatever comes in ----------------------------------------------------------------------------

EXPERTS, SAMPLES = 4, 3
ALL: dict[str, Callable[[], Router]] = {
    **{name: partial(make, HIDDEN, EXPERTS, 2) for name, (make, *_) in GATES.items()},
    "expert_choice": lambda: ExpertChoiceRouter(HIDDEN, EXPERTS, top_k=2),
    "soft": lambda: SoftRouter(HIDDEN, EXPERTS, slots_per_expert=2),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_float32_under_bfloat16(name: str, gate_dtype: torch.dtype, autocast: bool) -> None:
    """The decision is that of float32 arithmetic on the rounded inputs, bit for bit, under autocast too."""
    generator = torch.Generator().manual_seed(1)
    made, x_TM = ALL[name](), torch.randn(SAMPLES * 5, HIDDEN, generator=generator).bfloat16()
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(gate_dtype)
    tokens = Tokens(samples=SAMPLES, keys=SampleKeys(0, torch.arange(SAMPLES)))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = parts(made(x_TM, tokens))
    expected = parts(made.float()(x_TM.float(), tokens))
    for left, right in zip(found, expected, strict=True):
        assert left.dtype in (torch.float32, torch.int64)
        assert torch.equal(left, right)


# ---- each by itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, 6])
def test_a_token_cannot_choose_that_many(top_k: int) -> None:
    with pytest.raises(ValueError, match=r"1 to num_experts \(5\)"):
        SoftmaxRouter(HIDDEN, 5, top_k)


def test_what_is_learnt_beside_matrices_begins_as_told() -> None:
    """Scalars, which initial weights and weight decay leave alone; and noise of one spread for all logits."""
    scale, temperature = SoftRouter(6, 3, slots_per_expert=2).logit_scale, CosineRouter(8, 4, 2, proj_size=3)
    assert scale.dim() == temperature.log_temperature.dim() == 0 and scale.item() == 1.0
    assert temperature.log_temperature.item() == pytest.approx(math.log(INITIAL_TEMPERATURE))
    assert not NoisyRouter(5, EXPERTS, 2).noise_weight.any()


def test_without_keys_noise_is_pytorchs_own() -> None:
    made, drawn = NoisyRouter(HIDDEN, EXPERTS, 2), list[float]()
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(made(torch.ones(6, HIDDEN), Tokens(samples=2)).sums.z.item())
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_zero_vector_has_a_finite_gradient() -> None:
    made, x_TM = CosineRouter(8, 4, 2, proj_size=3), torch.zeros(2, 8, requires_grad=True)
    made(x_TM, Tokens()).weights[:, 0].sum().backward()
    assert x_TM.grad is not None
    assert x_TM.grad.abs().max() < 1e5


def test_logits_so_negative_that_all_scores_are_zero() -> None:
    made = SigmoidRouter(1, 3, 2)
    with torch.no_grad():
        made.weight.fill_(-1.0)
    choice = made(torch.full((2, 1), 200.0), Tokens())
    assert torch.equal(choice.weights, torch.zeros(2, 2))
    assert torch.equal(choice.sums.probability_BE, torch.zeros(1, 3))
    ((choice.weights.sum() + choice.sums.probability_BE.sum()) * 65536).backward()  # as a loss is scaled
    assert made.weight.grad is not None
    assert made.weight.grad.isfinite().all()
