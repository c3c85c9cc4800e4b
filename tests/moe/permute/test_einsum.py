"""SoftMoE's mixes against plain loops. Where tokens or experts choose: see test_index and test_orders."""

from __future__ import annotations

import torch
from hypothesis import given
from torch import Tensor

from penstock.moe.permute.einsum import EinsumPermutation
from penstock.moe.routers import SoftChoice
from penstock.routing.sizes import split_sizes
from tests.moe.permute.support import (
    HIDDEN,
    chunk_counts,
    numbers,
    row_of_slot,
    run_ranks,
    soft_choices,
    tokens_of,
)

EXPERTS = 3


def slot_vectors(x_TM: Tensor, choice: SoftChoice) -> dict[tuple[int, int, int], Tensor]:
    """The mix in every (sample, expert, slot), as sums written plainly."""
    samples, length, experts, slots = choice.mix_BLES.shape
    return {
        (b, e, s): torch.stack(
            [choice.mix_BLES[b, i, e, s] * x_TM[b * length + i] for i in range(length)]
        ).sum(0)
        for b in range(samples)
        for e in range(experts)
        for s in range(slots)
    }


@given(soft_choices(EXPERTS), chunk_counts)
def test_a_row_is_the_mix_of_its_sample(choice: SoftChoice, chunks: int) -> None:
    """Inside an expert: the slots of sample 0, then of sample 1, ...; a chunk is a range of those."""
    order, x_TM = EinsumPermutation(EXPERTS), numbers(tokens_of(choice), HIDDEN)
    plan = order.plan(choice, chunks)
    samples, _, _, slots = choice.mix_BLES.shape
    sizes = split_sizes(samples * slots, chunks)
    assert plan.slots == sizes
    assert plan.chunk_rows == tuple(size * EXPERTS for size in sizes)
    rows_RM = order.permute(x_TM, choice, plan)
    for (b, e, s), mixed in slot_vectors(x_TM, choice).items():
        torch.testing.assert_close(rows_RM[row_of_slot(e, b * slots + s, sizes, EXPERTS)], mixed)


@given(soft_choices(EXPERTS), chunk_counts)
def test_outputs_and_gradients_are_those_of_plain_sums(choice: SoftChoice, chunks: int) -> None:
    samples, length, experts, slots = choice.mix_BLES.shape
    x_TM = numbers(samples * length, HIDDEN)
    mixed = slot_vectors(x_TM, choice)
    terms = [
        [choice.weights[b, i, e, s] * (e + 2) * mixed[b, e, s] for e in range(experts) for s in range(slots)]
        for b in range(samples)
        for i in range(length)
    ]
    expected = torch.stack([torch.stack(parts).sum(0) for parts in terms])
    (out,) = run_ranks(EinsumPermutation(EXPERTS), [choice], [x_TM], EXPERTS, chunks)
    torch.testing.assert_close(out, expected)
    towards, inputs = numbers(*out.shape, seed=5).detach(), (x_TM, choice.mix_BLES, choice.weights)
    grads = torch.autograd.grad(out, inputs, towards)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs, towards))
