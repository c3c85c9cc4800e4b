"""Batches of different sizes, or of none: every rank takes part, and the step is that of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.runtime.batch import SampleNumbers
from penstock.topology import Layout
from tests.support.cases import small_case as case
from tests.support.parity import Case, own_batch, result_of, stack_of
from tests.support.ranks import Pools

UNEVEN = ((3, 0), (1, 5))


def uneven(
    gate: str,
    order: str,
    schedule: str,
    batches: tuple[int, ...],
    microbatches: int,
    dispatch: str = "flat",
    **moe: Any,
) -> Case:
    """`batch` is what the configuration is told; what the ranks bring is `batches`."""
    base = case(len(batches), gate, order, dispatch, "swiglu", schedule)
    cut = replace(base.schedule, microbatches=microbatches)
    return replace(base, schedule=cut, batches=batches, batch=4, moe=replace(base.moe, **moe))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("training", [True, False])
def test_numbers_of_samples_are_unique_among_those_that_differ(tp_size: int, training: bool) -> None:
    seen: dict[int, list[int]] = {}
    for rank in range(4):
        layout = Layout(world_size=4, ep_size=1, rank=rank, tp_size=tp_size)
        numbers = SampleNumbers(layout)
        mine = [int(n) for _ in range(3) for n in numbers.take(2, torch.device("cpu"), training=training)]
        assert seen.setdefault(layout.dp_rank, mine) == mine, "ranks that share attention count alike"
    found = sorted(number for mine in seen.values() for number in mine)
    count = 6 * 4 // tp_size
    assert found == (list(range(count)) if training else list(range(-count, 0)))


def evaluated(rank: int, step: Case) -> tuple[float, float]:
    """The loss without a backward, and that of a training step."""
    stack = stack_of(rank, step)
    tokens, labels = own_batch(rank, step)
    with torch.no_grad():
        loss = stack.eval()(tokens, labels).item()
    return loss, result_of(stack.train(), rank, step).loss


@pytest.mark.slow
@pytest.mark.every_value
@pytest.mark.parametrize("order", ["sort", "index"])
@pytest.mark.parametrize("batches", UNEVEN)
def test_evaluation_with_few_and_no_samples(ranks: Pools, order: str, batches: tuple[int, int]) -> None:
    step = uneven("softmax", order, "flowmoe", batches, 4)
    results = ranks(2).run(evaluated, step)
    assert results[0] == results[1]
    assert results[0][0] == results[0][1]


def without_samples(rank: int, step: Case) -> tuple[float, float]:
    stack = stack_of(rank, step)
    nothing = torch.zeros(0, step.model.seq_len - rank, dtype=torch.int64)
    loss = stack(nothing, nothing)
    loss.backward()
    gradients = [p.grad for p in stack.parameters()]
    assert all(g is not None and g.isfinite().all() for g in gradients)
    return loss.item(), max(float(g.abs().max()) for g in gradients if g is not None)


@pytest.mark.parametrize(
    ("gate", "order"), [("softmax", "sort"), ("softmax", "index"), ("soft", "soft slots")]
)
def test_a_batch_of_no_samples_at_all_is_a_loss_of_zero(ranks: Pools, gate: str, order: str) -> None:
    step = uneven(gate, order, "penstock", (0, 0), 2)
    assert ranks(2).run(without_samples, step) == [(0.0, 0.0)] * 2


def other_lengths(rank: int, step: Case) -> str:
    stack = stack_of(rank, step)
    tokens = torch.zeros(2, step.model.seq_len - rank, dtype=torch.int64)
    try:
        loss = stack(tokens, tokens)
    except ValueError as error:
        stack(tokens[:, :3], tokens[:, :3]).backward()  # the ranks are still in step
        return str(error)
    loss.backward()
    return "no error"


def test_fixed_slots_need_samples_of_one_length(ranks: Pools) -> None:
    """Said on all ranks at once; dropless routing takes any."""
    for message in ranks(2).run(other_lengths, uneven("softmax", "index", "flowmoe", (2, 2), 2)):
        assert "samples of different lengths, 4 to 5 tokens" in message
        assert "moe.capacity_factor = none" in message
    found = ranks(2).run(other_lengths, uneven("softmax", "sort", "flowmoe", (2, 2), 2))
    assert found == ["no error"] * 2


def told_the_largest(rank: int, step: Case) -> tuple[float, float]:
    """The loss where ranks ask each other, and where they are told."""
    tokens, labels = own_batch(rank, step)
    asked, told = (stack_of(rank, step).eval() for _ in range(2))
    return asked(tokens, labels).item(), told(tokens, labels, largest_batch=3).item()


def test_the_largest_batch_may_be_told(ranks: Pools) -> None:
    step = uneven("softmax", "index", "flowmoe", (3, 1), 2)
    for asked, told in ranks(2).run(told_the_largest, step):
        assert asked == told


def told_too_little(rank: int, step: Case) -> None:
    tokens = torch.zeros(3, step.model.seq_len, dtype=torch.int64)
    stack_of(rank, step)(tokens, tokens, largest_batch=2)


def test_a_largest_batch_that_is_too_small_is_refused(ranks: Pools) -> None:
    step = uneven("softmax", "index", "flowmoe", (3, 3), 2)
    for said in ranks(2).told(ValueError, told_too_little, step):
        assert said.startswith("largest_batch = 2: this rank has a batch of 3")
