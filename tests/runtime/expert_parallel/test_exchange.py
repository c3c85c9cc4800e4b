"""The MoE layer with ExpertParallel under DistributedDataParallel: real steps against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.features.dispatch import DISPATCHES
from penstock.moe import update_expert_biases
from penstock.moe.config import BalanceGroup
from penstock.runtime.expert_parallel.exchange import ignore_experts
from tests.support.exchange import (
    IN,
    LENGTH,
    Case,
    Model,
    Tensors,
    batch,
    exchange_of,
    logical,
    mean_loss,
    model_of,
    numbers,
    rank_loss,
)
from tests.support.ranks import Pools

LEARNING_RATE = 0.1
TOLERANCE = 1e-10

ACCEPTED = [
    *product(["softmax", "sigmoid"], ["sort", "merged", "index", "einsum"]),
    ("expert_choice", "index"),
    ("expert_choice", "einsum"),
]


JOINED = "node_once"


def dispatches(gate: str, order: str) -> list[str]:
    """Those that can take the order's rows; one copy per node makes one of several."""
    joins = gate != "expert_choice" and order in ("merged", "index")
    return [name for name in DISPATCHES if joins or name != JOINED]


@dataclass(frozen=True)
class Step:
    """What a step left, by names that do not depend on the layout; experts as `name.EXPERT`."""

    loss: float
    gradients: Tensors
    parameters: Tensors
    bias: list[float]


# On the ranks


def train_step(rank: int, case: Case) -> Step:
    model = model_of(case, exchange_of(case.ep_size, case.node))
    if case.prepare is not None:
        model = case.prepare(model)
    wrapped = DistributedDataParallel(ignore_experts(model))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    total = 0.0
    for turn in range(case.passes):
        last = turn == case.passes - 1
        with wrapped.no_sync() if case.no_sync and not last else nullcontext():
            loss = rank_loss(wrapped, batch(case, turn, rank))
            loss.backward()
        total += loss.item()
        if case.passes > 1:
            evaluate(wrapped, batch(case, 7, rank))
    optimizer.step()
    return finished(model, total)


def evaluate(model: nn.Module, data: tuple[Tensor, Tensor, Tensor]) -> None:
    model.eval()
    with torch.no_grad():
        model(data[0])
    model.train()


def finished(model: Model, loss: float) -> Step:
    """What is left behind `optimizer.step()`; moves the bias."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    update_expert_biases(model)
    bias = model.layer.gate.bias
    return Step(
        loss,
        logical(model, {name: gradient.clone() for name, gradient in gradients.items()}),
        logical(model, {name: p.detach().clone() for name, p in model.named_parameters()}),
        [] if bias is None else bias.value_E.tolist(),
    )


# The reference


def reference(case: Case) -> Step:
    """A step of one process that holds all experts, sees the batch of every rank, and trains on their mean.

    It runs the layer alone, which tests/moe/test_alone.py compares with loops.
    """
    model = model_of(replace(case, dispatch="flat"), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    total = 0.0
    for turn in range(case.passes):
        loss = mean_loss(model, case, [batch(case, turn, rank) for rank in range(case.world)])
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        if parameter.grad is None:  # a module expert without rows
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return finished(model, total)


def check(ranks: Pools, case: Case) -> list[Step]:
    """Compare with the reference; what several ranks hold must be equal to the bit."""
    steps, wanted = ranks(case.world).run(train_step, case), reference(case)
    assert sum(step.loss for step in steps) / case.world == pytest.approx(wanted.loss, rel=TOLERANCE)
    for what in ("gradients", "parameters"):
        found: Tensors = {}
        for step in steps:
            for name, tensor in getattr(step, what).items():
                assert torch.equal(found.setdefault(name, tensor), tensor), f"{what} of {name} differ by rank"
        expected = getattr(wanted, what)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            difference = float((found[name] - tensor).norm())
            assert difference <= TOLERANCE * max(float(tensor.norm()), 1e-6), (
                f"{what} of {name}: {difference}"
            )
    assert all(step.bias == wanted.bias for step in steps)
    return steps


# Training steps


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize(("gate", "order", "dispatch"), [(*p, d) for p in ACCEPTED for d in dispatches(*p)])
@pytest.mark.parametrize("world", [2, 4])
def test_a_step_equals_one_process(ranks: Pools, world: int, gate: str, order: str, dispatch: str) -> None:
    check(ranks, Case(world=world, node=world // 2, gate=gate, order=order, dispatch=dispatch))


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep_size", "node"), [(2, 1, None), (4, 2, None), (4, 2, 1), (4, 1, None)])
@pytest.mark.parametrize(("gate", "order"), ACCEPTED)
def test_replicas_of_experts(
    ranks: Pools, gate: str, order: str, world: int, ep_size: int, node: int | None
) -> None:
    """`check` sees to it that replicas have the same gradients and parameters."""
    for dispatch in dispatches(gate, order) if node else ("flat",):
        check(ranks, Case(world=world, ep_size=ep_size, node=node, gate=gate, order=order, dispatch=dispatch))


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("balance", ["global", "sequence", "microbatch"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ep_size", [4, 2])
def test_balance_is_judged_over_its_group(
    ranks: Pools, ep_size: int, padded: bool, balance: BalanceGroup
) -> None:
    for gate, order in (("softmax", "sort"), ("sigmoid", "merged"), ("softmax", "index")):
        case = Case(world=4, ep_size=ep_size, gate=gate, order=order, balance=balance, padded=padded)
        check(ranks, case)


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("experts", ["swiglu", "module"])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("ep_size", [4, 2])
def test_other_experts_and_hooks(ranks: Pools, ep_size: int, hooked: bool, experts: str) -> None:
    for order in ("sort", "einsum") if hooked else ("sort", "merged", "einsum"):
        check(ranks, Case(world=4, ep_size=ep_size, order=order, experts=experts, hooked=hooked))


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["gelu", "module"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts_that_idle_on_one_rank_do_not_stop_the_others(
    ranks: Pools, ep_size: int, experts: str
) -> None:
    """A replica without a row takes part in the sum over replicas all the same."""
    for order in ("sort", "merged"):
        check(ranks, Case(world=2, ep_size=ep_size, order=order, experts=experts, idle=(0,)))


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("samples", [(3, 1, 2, 1), (2, 0, 1, 0)])
@pytest.mark.parametrize("ep_size", [4, 2])
@pytest.mark.parametrize("order", ["sort", "merged"])
def test_ranks_may_have_different_numbers_of_tokens(
    ranks: Pools, order: str, ep_size: int, samples: tuple[int, ...]
) -> None:
    """Or none at all."""
    for dispatch in dispatches("softmax", order) if ep_size == 4 else ("flat",):
        check(
            ranks,
            Case(world=4, ep_size=ep_size, node=2, order=order, dispatch=dispatch, samples=samples),
        )


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("ep_size", "experts"), [(4, "gelu"), (2, "module")])
def test_checkpoint_around_the_layer(ranks: Pools, ep_size: int, experts: str, reentrant: bool) -> None:
    for gate, order in ACCEPTED:
        case = Case(world=4, ep_size=ep_size, gate=gate, order=order, experts=experts, reentrant=reentrant)
        check(ranks, case)


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("ep_size", [4, 2])
def test_accumulated_passes_and_evaluation_between(ranks: Pools, ep_size: int, no_sync: bool) -> None:
    """The bias moves by what all ranks trained on; DDP, which hands out buffers, must leave the counts."""
    for gate in ("softmax", "sigmoid"):
        steps = check(ranks, Case(world=4, ep_size=ep_size, gate=gate, passes=3, no_sync=no_sync))
        assert (len(set(steps[0].bias)) > 1) == (gate == "sigmoid")


def copied(model: Model) -> Model:
    """A copy behind a pass: hooks on parameters and tags would be lost."""
    model(numbers(1, LENGTH, IN, seed=5))
    return copy.deepcopy(model)


def assigned(model: Model) -> Model:
    """Other parameters in the same places."""
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    return model


def from_nowhere(model: Model) -> Model:
    """From the meta device, as large models are built."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [copied, assigned, from_nowhere])
def test_other_parameter_objects_train_alike(ranks: Pools, prepare: Callable[[Model], Model]) -> None:
    for ep_size in (4, 2):
        check(ranks, Case(world=4, ep_size=ep_size, prepare=prepare))


@pytest.mark.slow
def test_one_rank_alone_in_its_group(ranks: Pools) -> None:
    for gate, order in ACCEPTED:
        check(ranks, Case(world=1, gate=gate, order=order))
