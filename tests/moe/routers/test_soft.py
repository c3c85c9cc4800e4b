"""SoftMoE's gate against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe.gates import SoftRouter
from penstock.moe.routers import SoftChoice
from tests.moe.routers.plain import Case, cases, check_values, dot, length, softmax, squared_log_partition
from tests.support.draws import draws


@draws(30)
@given(cases(), st.integers(1, 2))
def test_against_loops(case: Case, slots: int) -> None:
    made = SoftRouter(4, case.num_experts, slots_per_expert=slots)
    case.fill(made)
    x_TM, valid, columns = case.x(), case.valid, case.num_experts * slots
    choice = made(x_TM, case.tokens)
    assert isinstance(choice, SoftChoice)
    logits = [
        [made.logit_scale * dot(x_TM[t], phi) / (length(x_TM[t]) * length(phi)) for phi in made.weight]
        for t in range(case.count)
    ]
    nothing = torch.zeros(columns).double()
    weights = [torch.stack(softmax(row)) if valid[t] else nothing for t, row in enumerate(logits)]
    mix = [nothing] * case.count
    for sample in range(case.samples):
        there = [t for t in range(sample * case.length, (sample + 1) * case.length) if valid[t]]
        by_slot = [softmax([logits[t][n] for t in there]) for n in range(columns)]
        for i, t in enumerate(there):
            mix[t] = torch.stack([by_slot[n][i] for n in range(columns)])
    z = sum(
        (squared_log_partition(row) for t, row in enumerate(logits) if valid[t]), torch.zeros(()).double()
    )
    shape = (case.samples, case.length, case.num_experts, slots)
    found = [choice.mix_BLES, choice.weights, choice.sums.z]
    check_values(made, x_TM, found, [torch.stack(mix).view(shape), torch.stack(weights).view(shape), z])
    assert choice.sums.chosen_BE.tolist() == [[slots] * case.num_experts] * case.samples
    assert torch.equal(choice.sums.probability_BE, torch.zeros(case.samples, case.num_experts).double())


def test_an_expert_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="slots_per_expert = 0"):
        SoftRouter(6, 3, slots_per_expert=0)
