"""Expert choice against loops."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.gates import ExpertChoiceRouter
from penstock.moe.routers import ExpertChoice
from penstock.routing.sizes import capacity_slots
from tests.moe.routers.plain import Case, best, cases, check_values, dot, softmax, squared_log_partition
from tests.support.draws import draws


@draws(40)
@given(cases(), st.sampled_from([0.3, 1.0, 1.7]), st.integers(1, 3))
def test_against_loops(case: Case, factor: float, least: int) -> None:
    assume(case.num_experts > 1)  # with one expert every probability is 1, and any tokens may be taken
    made = ExpertChoiceRouter(
        4,
        case.num_experts,
        top_k=case.top_k,
        capacity_factor=factor,
        min_capacity=least,
        scale=case.scale,
    )
    case.fill(made)
    x_TM, valid = case.x(), case.valid
    choice = made(x_TM, case.tokens)
    slots = min(case.count, capacity_slots(case.count, case.num_experts, case.top_k, factor, least))
    assert isinstance(choice, ExpertChoice)
    assert choice.tokens == case.count
    assert choice.tokens_ES.shape == (case.num_experts, slots)

    logits = [[dot(weight, x_TM[t]) for weight in made.weight] for t in range(case.count)]
    probability = [softmax(row) for row in logits]
    chosen = [[0] * case.num_experts for _ in range(case.samples)]
    weights, found = [], []
    for e in range(case.num_experts):
        there = [t for t in range(case.count) if valid[t]]
        taken = [there[i] for i in best([probability[t][e] for t in there], slots)]
        named = choice.tokens_ES[e].tolist()
        assert named[: len(taken)] == taken
        assert len(set(named)) == slots
        assert not any(valid[t] for t in named[len(taken) :])
        assert not choice.weights[e, len(taken) :].any()
        found += list(choice.weights[e, : len(taken)])
        weights += [probability[t][e] * case.scale for t in taken]
        for t in taken:
            assert valid[t]
            chosen[t // case.length][e] += 1
    assert choice.sums.chosen_BE.tolist() == chosen
    assert torch.equal(choice.sums.probability_BE, torch.zeros(case.samples, case.num_experts).double())
    z = sum(
        (squared_log_partition(row) for t, row in enumerate(logits) if valid[t]), torch.zeros(()).double()
    )
    check_values(made, x_TM, [joined(found), choice.sums.z], [joined(weights), z])


@draws(20)
@given(cases(), st.integers(0, 9))
def test_slots_are_made_for_the_rank_with_most_tokens(case: Case, more: int) -> None:
    """Slots beyond the last token name some token again, with a weight of zero. Which padding token fills a
    slot of no weight is open."""
    made = case.fill(ExpertChoiceRouter(4, case.num_experts, top_k=case.top_k, capacity_factor=2.0))
    most = case.count + more
    alone, choice = (made(case.x(), replace(case.tokens, most=n)) for n in (None, most))
    slots = min(most, capacity_slots(most, case.num_experts, case.top_k, 2.0, 1))
    assert choice.tokens_ES.shape == (case.num_experts, slots)
    here = alone.tokens_ES.shape[1]
    assert torch.equal(choice.weights[:, :here], alone.weights)
    counts = alone.weights != 0
    assert torch.equal(choice.tokens_ES[:, :here][counts], alone.tokens_ES[counts])
    assert not choice.weights[:, case.count :].any()


def joined(values: list[Tensor]) -> Tensor:
    return torch.stack(values) if values else torch.zeros(0).double()
