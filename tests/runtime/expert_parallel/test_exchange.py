"""The MoE layer with ExpertParallel in steps by PyTorch, on real ranks, against one process."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from penstock import clip_grad_norm_, expert_parameters
from penstock.features.dispatch import DISPATCHES
from penstock.moe import update_expert_biases
from penstock.runtime.expert_parallel.exchange import ignore_experts
from tests.support.close import check_all_close
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
from tests.support.pairwise import covering
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

LEARNING_RATE, LIMIT = 0.1, 0.02
TOLERANCE = 1e-10
JOINED = "node_once"


@dataclass(frozen=True)
class Step:
    """What training left, by names that do not depend on the layout; experts as `name.EXPERT`.

    gradients: of the last step. norms: of all steps, before clipping.
    """

    loss: float
    gradients: Tensors
    parameters: Tensors
    bias: list[float]
    norms: list[float]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(
    model: Model, case: Case, backward: Callable[[int, bool], float], clip: Callable[[], Tensor]
) -> Step:
    """Steps of a model. backward: runs a pass, of which it is told whether it is the last of its step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    total, norms = 0.0, list[float]()
    for step in range(2 if case.clip else 1):
        optimizer.zero_grad()
        for turn in range(case.passes):
            total += backward(step * case.passes + turn, turn == case.passes - 1)
        if case.clip:
            norms.append(float(clip()))
        optimizer.step()
        update_expert_biases(model)
    bias = model.layer.gate.bias
    return Step(
        total,
        logical(model, {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}),
        logical(model, {name: whole(p) for name, p in model.named_parameters()}),
        [] if bias is None else bias.value_E.tolist(),
        norms,
    )


def train_on_ranks(rank: int, case: Case) -> Step:
    """Train one rank's part of the model, with evaluation between accumulated passes."""
    model = model_of(case, exchange_of(case.ep_size, case.node))
    if case.prepare is not None:
        model = case.prepare(model)
    wrapped: Any = ignore_experts(model)
    if case.wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        fully_shard(model, ignored_params=expert_parameters(model))

    def backward(turn: int, last: bool) -> float:
        with wrapped.no_sync() if case.no_sync and not last else nullcontext():
            loss = rank_loss(wrapped, batch(case, turn, rank))
            loss.backward()
        if case.passes > 1 and case.wrap == "ddp":  # FSDP would leave its parameters gathered
            wrapped.eval()
            with torch.no_grad():
                wrapped(batch(case, 7, rank)[0])
            wrapped.train()
        return loss.item()

    def clip() -> Tensor:
        parameters = list(wrapped.parameters())
        random.Random(rank if case.clip == "shuffled" else 0).shuffle(parameters)
        given: nn.Module | Iterable[Tensor] = wrapped if case.clip == "module" else parameters
        return clip_grad_norm_(given, LIMIT, case.norm_type)

    return trained(model, case, backward, clip)


def train_alone(case: Case) -> Step:
    """Train one process that holds all experts, sees the batch of every rank, and trains on their mean.

    It runs the layer alone, which tests/moe/test_alone.py compares with loops.
    """
    model = model_of(replace(case, dispatch="flat"), None)

    def backward(turn: int, last: bool) -> float:
        del last
        loss = mean_loss(model, case, [batch(case, turn, rank) for rank in range(case.world)])
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is None:  # a module expert without rows
                parameter.grad = torch.zeros_like(parameter)
        return loss.item()

    def clip() -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT, case.norm_type)

    return trained(model, case, backward, clip)


def check(ranks: Pools, case: Case) -> None:
    """Compare with one process; what several ranks hold must be equal to the bit."""
    steps, wanted = ranks(case.world).run(train_on_ranks, case), train_alone(case)
    assert sum(step.loss for step in steps) / case.world == pytest.approx(wanted.loss, rel=TOLERANCE)
    for what in ("gradients", "parameters"):
        found: Tensors = {}
        for step in steps:
            for name, tensor in getattr(step, what).items():
                assert torch.equal(found.setdefault(name, tensor), tensor), f"{what} of {name} differ by rank"
        check_all_close(found, getattr(wanted, what), TOLERANCE, what, least=1e-6)
    assert all((step.bias, step.norms) == (wanted.bias, steps[0].norms) for step in steps)
    assert bool(wanted.bias) == (case.gate == "sigmoid")
    assert steps[0].norms == pytest.approx(wanted.norms, rel=TOLERANCE)
    assert all(norm > LIMIT for norm in wanted.norms), "nothing was clipped"


# ---- what a step can differ in -----------------------------------------------------------------------------


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


AXES: dict[str, tuple[Any, ...]] = {
    "layout": ((2, None), (4, None), (4, 2), (4, 1), (2, 1), (1, None)),
    "router": (
        *product(["softmax", "sigmoid"], ["sort", "merged", "index", "einsum"]),
        ("expert_choice", "index"),
        ("expert_choice", "einsum"),
    ),
    "dispatch": tuple(DISPATCHES),
    "wrap": ("ddp", "fully_shard"),
    "reentrant": (None, False, True),
    "passes": (1, 3),
    "no_sync": (False, True),
    "prepare": (None, copied, assigned, from_nowhere),
    "clip": ("", "module", "list", "shuffled"),
    "norm_type": (2.0, 1.0, math.inf),
    "experts": ("gelu", "swiglu", "module"),
    "balance": ("global", "sequence", "microbatch"),
    "samples": ((), (3, 1, 2, 1), (2, 0, 1, 0)),
    "hooked": (False, True),
    "alike": (False, True),
    "padded": (False, True),
}
"""layout: ranks, and over how many of them experts are spread. router: the gate and the order of rows.

Ranks may have different numbers of tokens, or none; replicas of an expert without a row take part in sums.
"""


def fits(known: Mapping[str, Any]) -> bool:  # noqa: PLR0911 - a table of what there is not
    """Whether there is a step of these values; some may be missing."""
    gate, order = known.get("router", ("softmax", "index"))
    joined = known.get("dispatch") == JOINED
    if joined and (order not in ("merged", "index") or gate == "expert_choice"):
        return False
    if known.get("dispatch", "flat") != "flat" and known.get("layout") in ((4, 1), (2, 1), (1, None)):
        return False
    if known.get("wrap") == "fully_shard" and (
        known.get("no_sync")
        or known.get("reentrant") is not None
        or known.get("prepare") in (assigned, from_nowhere)
    ):
        return False
    if known.get("no_sync") and known.get("passes") == 1:
        return False
    if known.get("norm_type", 2.0) != 2.0 and not known.get("clip", "list"):
        return False
    if known.get("samples") and order not in ("sort", "merged"):
        return False  # with a capacity ranks need equally many tokens
    if known.get("hooked") and (joined or order == "merged"):
        return False  # what is bent are sums over the experts of a rank
    return not (known.get("alike") and gate == "expert_choice")  # which of equal tokens is chosen is open


def case_of(values: Mapping[str, Any]) -> Case:
    """The step of a value for every axis, or the first."""
    known = {axis: each[0] for axis, each in AXES.items()} | dict(values)
    (world, ep_size), (gate, order) = known.pop("layout"), known.pop("router")
    node = None if known["dispatch"] == "flat" else 1 if ep_size else world // 2
    samples = known.pop("samples")[:world]
    return Case(world=world, ep_size=ep_size, node=node, gate=gate, order=order, samples=samples, **known)


def named(values: Mapping[str, Any]) -> str:
    """The values that are not the first of their axis."""
    others = [value for axis, value in values.items() if value != AXES[axis][0]]
    return "-".join(getattr(value, "__name__", str(value)) for value in others)


@pytest.mark.few(21)
@pytest.mark.parametrize("values", [*covering(AXES, fits)], ids=named)
def test_training_is_that_of_one_process(ranks: Pools, values: Mapping[str, Any]) -> None:
    check(ranks, case_of(values))
