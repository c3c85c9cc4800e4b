"""What runs again before its backward: the same step, in less memory, and nothing is sent again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch

from penstock.graph import Phase
from penstock.runtime.features.recompute import Kept, KeptSlice, Replay
from penstock.step.shape import Recompute
from tests.support.cases import small_case as case
from tests.support.parity import Case, own_batch, stack_of
from tests.support.ranks import Pools

WHATS: tuple[Recompute, ...] = ("experts", "blocks")
CPU = torch.device("cpu")


def two_layers(
    what: Recompute, schedule: str, gate: str = "softmax", experts: str = "swiglu", world_size: int = 2
) -> Case:
    """A dense layer below one with experts; backward chunks are other than forward ones where they may be."""
    step = case(world_size, gate, "sort", "flat", experts, schedule)
    cut = replace(step.schedule, chunks=3, backward_chunks=2)
    model = replace(step.model, num_layers=3, moe_layers=(0, 2))
    return replace(step, schedule=cut, model=model, recompute=what)


# ---- what it saves, and what it does not cost --------------------------------------------------------------


def kept_and_sent(rank: int, step: Case) -> tuple[int, Counter[int], int]:
    """Of one step: bytes kept from forward to backward, by autograd or to run again; bytes sent to every
    rank; tasks that ran again."""
    stack = stack_of(rank, step)
    tokens, labels = own_batch(rank, step)
    weights = {p.untyped_storage().data_ptr() for p in stack.model.parameters()}
    before, kept = stack.machinery.transports.traffic.copy(), dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = stack(tokens, labels)
    for tensor in filter(torch.is_tensor, inputs_of(loss.grad_fn.step.execution.values)):
        keep(tensor)
    loss.backward()
    again = sum(record.task.phase is Phase.RECOMPUTE for record in stack.records())
    return sum(kept.values()), Counter(stack.machinery.transports.traffic - before), again


def inputs_of(values: list[Any]) -> Iterator[Any]:
    """What the first run of tasks has kept for the second."""
    for value in values:
        if isinstance(value, Kept):
            yield from (each for given in value.inputs.values() for each in given)
        elif isinstance(value, dict):
            yield from (each.rows_RM for each in value.values() if isinstance(each, KeptSlice))


def test_less_is_kept_and_nothing_is_sent_again(ranks: Pools) -> None:
    base = two_layers("none", "flowmoe")
    step = replace(base, model=replace(base.model, hidden_size=32, seq_len=64))
    found = {what: ranks(2).run(kept_and_sent, replace(step, recompute=what)) for what in ("none", *WHATS)}
    for none, experts, blocks in zip(*found.values(), strict=True):
        assert blocks[0] < 0.5 * none[0] and experts[0] < none[0]
        assert none[1] == experts[1] == blocks[1] != Counter()
        # two MoE layers: 2 chunks, and attention, shared experts; a dense one: all of it; 2 microbatches
        assert (none[2], experts[2], blocks[2]) == (0, 2 * 2, 2 * (2 * 3 + 1))


# ---- how a computation is repeated -------------------------------------------------------------------------


def replay_of(compute: Any, scores: torch.Tensor) -> None:
    """The same input gives the same outputs, and the gradient of a plain run."""
    plain, again, replay = scores.clone().requires_grad_(), scores.clone().requires_grad_(), Replay(CPU)
    torch.manual_seed(3)
    wanted = compute(plain)
    torch.manual_seed(3)
    with replay.first():
        first = compute(scores)
    with replay.second():
        found = compute(again)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(wanted, first, found, strict=True))
    wanted[0].square().sum().backward()
    found[0].square().sum().backward()
    assert plain.grad is not None and again.grad is not None and torch.equal(plain.grad, again.grad)


def test_selections_and_random_numbers_are_those_of_the_first_time() -> None:
    torch.manual_seed(0)  # or dropout may leave a row fewer scores than are chosen
    scores, replay = torch.rand(5, 8, dtype=torch.float64), Replay(CPU)

    def compute(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, experts = torch.nn.functional.dropout(scores, 0.3).topk(2, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True) + 1
        return weights * scores.max(dim=-1, keepdim=True).values, experts

    with replay.first():
        first = compute(scores)
    replay_of(compute, scores)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    other = (-scores).requires_grad_()  # as if rounding had turned everything round
    with replay.second():
        again, experts = compute(other)
    assert torch.equal(experts, first[1]) and not first[0].requires_grad
    assert torch.equal(torch.rand(3), expected), "random numbers of others go on as if nothing had been drawn"
    again.sum().backward()
    assert other.grad is not None
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, first[1], True)
    chosen |= torch.zeros_like(chosen).scatter_(1, scores.argmax(dim=1, keepdim=True), True)
    assert torch.equal(other.grad != 0, chosen)


def drawn_elsewhere(numbers: list[float]) -> None:
    """Another thread draws, as a loader of data may."""
    thread = Thread(target=lambda: numbers.append(float(torch.rand(()))))
    thread.start()
    thread.join()


def test_random_numbers_of_other_threads_are_their_own() -> None:
    """A second run does not set back what they draw from, and what they draw changes none of its masks."""
    elsewhere = list[float]()
    own = torch.Generator().manual_seed(7)

    def compute() -> list[torch.Tensor]:
        found = [torch.nn.functional.dropout(torch.ones(64), 0.5)]
        drawn_elsewhere(elsewhere)
        found += [torch.rand(4), torch.randn_like(found[0]), torch.randint(9, (8,)), torch.randperm(9)]
        drawn_elsewhere(elsewhere)
        found.append(torch.empty(5).uniform_(generator=own))
        found.append(torch.native_dropout(torch.ones(64), 0.5, True)[0])
        return found

    replay = Replay(CPU)
    torch.manual_seed(3)
    with replay.first():
        first = compute()
    state = own.get_state()
    torch.manual_seed(5)
    with replay.second():
        second = compute()
    assert all(map(torch.equal, first, second)) and torch.equal(own.get_state(), state)
    torch.manual_seed(5)
    assert elsewhere[2:] == [float(torch.rand(())) for _ in range(2)]
    assert len({*elsewhere}) == 4


def test_a_second_run_that_goes_another_way_is_refused() -> None:
    """It would get what was selected for something else."""
    scores = torch.rand(5, 8)
    for other in (scores.sort, lambda: scores.topk(2) + scores.topk(2), lambda: torch.rand(2)):
        replay = Replay(CPU)
        with replay.first():
            scores.topk(2)
        with pytest.raises(RuntimeError), replay.second():
            other()
