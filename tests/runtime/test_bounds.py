"""Steps whose rows are bounded by those of earlier steps: the same numbers, and none that is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.decision import ScheduleConfig
from penstock.device import using
from penstock.runtime import PipelinedStack
from tests.support.card import MEMORY, CardDevice, install
from tests.support.cases import small_case as case
from tests.support.close import check_all_close
from tests.support.parity import Case, batch_of, gradients_of, own_batch, stack_of
from tests.support.ranks import Pools, RankPool

LATE = pytest.mark.parametrize("late", [False, True])
"""Whether ranks know in backward that a step has to run again, or at the end of its forward half."""


def bounded(how: Any, schedule: str = "flowmoe", world_size: int = 2, **more: Any) -> Case:
    """A step of two MoE layers."""
    step = case(world_size, "softmax", "sort", "flat", "swiglu", schedule)
    moe, model = replace(step.moe, bound_factor=1.25), replace(step.model, num_layers=2)
    return replace(step, moe=moe, model=model, bounds=how, **more)


# ---- between forward and backward -------------------------------------------------------------------------


def _count(passes: Tensor) -> None:
    passes.add_(1)


def one_step(rank: int, step: Case, what: str) -> tuple[float, dict[str, Tensor], float]:
    """A step whose stack is changed before backward: loss, gradients, what a module has counted."""
    stack, other = stack_of(rank, step), stack_of(rank, replace(step, schedule=WHOLE))
    passes = torch.zeros(())
    stack.model.register_buffer("passes", passes)
    gate = next(layer.gate for layer in stack.moe_layers if layer is not None)
    gate.register_forward_hook(lambda *_: _count(passes))
    batch = [whole[step.mine(rank)] for whole in batch_of(step)]
    if what == "changed":  # gradients of earlier passes, so that ranks look before backward begins
        stack(*batch).backward()
    loss = stack(*batch)
    CHANGES[what](stack, other)
    loss.backward()
    gradients = gradients_of(stack.model)
    return loss.item(), gradients, passes.item()


def _change_a_weight(stack: PipelinedStack, _: PipelinedStack) -> None:
    with torch.no_grad():
        next(stack.model.parameters()).mul_(1.5)


WHOLE = ScheduleConfig(name="sequential")
CHANGES: dict[str, Callable[[PipelinedStack, PipelinedStack], object]] = {
    "nothing": lambda *_: None,
    "plan": lambda stack, other: stack.adopt(other.plan),
    "precision": lambda stack, _: stack.compute_in(torch.bfloat16),
    "loss": lambda stack, _: stack.minimise(replace(stack.moe, aux_loss_coeff=5.0), stack.balance, 3.0),
    "seed": lambda stack, _: setattr(stack, "seed", 7),
    "changed": _change_a_weight,
}


@pytest.mark.every_value
@pytest.mark.parametrize("what", [each for each in CHANGES if each != "changed"])
@LATE
def test_a_second_run_is_of_the_same_step(ranks: Pools, late: bool, what: str) -> None:
    """Whatever the stack has been told meanwhile; and modules that count passes count one."""
    step = bounded("exceeded", batch=3, late=late, double=True)
    counted = replace(step, bounds="", moe=replace(step.moe, bound_factor=None))
    found, wanted = (ranks(2).run(one_step, each, what) for each in (step, counted))
    for (loss, gradients, passes), (other_loss, others, other_passes) in zip(found, wanted, strict=True):
        assert (loss, passes) == (pytest.approx(other_loss, rel=1e-12), other_passes)
        check_all_close(gradients, others, 1e-10)


@pytest.mark.every_value
@pytest.mark.parametrize("how", ["", "kept", "exceeded"])
@LATE
def test_a_model_that_was_changed_is_refused(ranks: Pools, late: bool, how: Any) -> None:
    """Also where the step would be run again, with what the model has become."""
    for text in ranks(2).told(RuntimeError, one_step, bounded(how, batch=3, late=late), "changed"):
        assert "was changed between forward and backward" in text


# ---- what a first run leaves -------------------------------------------------------------------------------


def most_bytes(rank: int, step: Case) -> tuple[int, int]:
    """The most bytes of a step in bfloat16, beyond those before it, and how many it leaves."""
    device = install()
    with using(CardDevice()):
        stack = stack_of(rank, replace(step, card=True))
        stack.compute_in(torch.bfloat16)
        batch = [whole[step.mine(rank)].to(device) for whole in batch_of(step)]
        before = MEMORY.peak_bytes = MEMORY.now_bytes
        loss = stack(*batch)
        loss.backward()
        return MEMORY.peak_bytes - before, MEMORY.now_bytes - before


@LATE
@pytest.mark.slow
def test_memory_is_that_of_one_run(cards: Pools, late: bool) -> None:
    """The first run leaves nothing, such as copies of the experts' weights, while the second one runs."""
    step = bounded("exceeded", batch=8, late=late)
    step = replace(step, moe=replace(step.moe, moe_ffn_hidden_size=512))
    counted = replace(step, bounds="", moe=replace(step.moe, bound_factor=None))
    found, wanted = (cards(2).run(most_bytes, each) for each in (step, counted))
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(here <= 1.02 * there for here, there in zip(ours, theirs, strict=True)), (ours, theirs)


def failing(rank: int, step: Case, run: int) -> tuple[str, list[bool]]:
    """What a rank says of a step whose second run fails on rank 1, and whether gradients are as they were.

    run: the run of the first layer's gate that fails.
    """
    stack, runs = stack_of(rank, step), list[int]()
    gate = next(layer.gate for layer in stack.moe_layers if layer is not None)
    experts = [p for p in stack.model.parameters() if getattr(p, "allreduce", True)]
    for parameter in experts:
        parameter.grad = torch.ones_like(parameter)

    def count(*_: Any) -> None:
        runs.append(1)
        if rank == 1 and len(runs) == run:
            raise ArithmeticError("the gate has failed")

    gate.register_forward_hook(count)
    batch = [whole[step.mine(rank)] for whole in batch_of(step)]
    try:
        stack(*batch).backward()
    except Exception as error:
        return str(error), [bool((p.grad == 1).all()) for p in experts if p.grad is not None]
    return "", []


@pytest.mark.slow
@LATE
def test_a_second_run_that_fails_on_a_rank_ends_on_all(late: bool) -> None:
    """And gradients of earlier passes are as they were."""
    pool = RankPool(2)  # its connections are cut
    microbatches = 2
    step = bounded("exceeded", batch=4, late=late)
    found = pool.run(failing, step, microbatches + 1)
    assert "the gate has failed" in found[1][0]
    assert all(said and kept and all(kept) for said, kept in found)


# ---- several steps -----------------------------------------------------------------------------------------

NUMBERS = 6


@dataclass(frozen=True)
class Seen:
    """What a rank has of some steps: losses, gradients, how many were run again."""

    losses: list[float]
    gradients: dict[str, Tensor]
    repeats: int


def several(rank: int, step: Case, passes: int, largest: int) -> Seen:
    """Steps of growing batches, each of several passes that add up; and an evaluation.

    largest: samples of the last ones.
    """
    stack, losses = stack_of(rank, step), []
    for number in range(NUMBERS):
        stack.model.zero_grad()
        samples = 1 if number < NUMBERS - 2 else largest
        for again in range(passes):
            other = replace(step, seed=10 * number + again, batch=samples)
            tokens, labels = own_batch(rank, other)
            loss = stack(tokens, labels)
            loss.backward()
            losses.append(loss.item())
    gradients = gradients_of(stack.model)
    repeats = stack.bounds.repeats
    with torch.no_grad():  # of more samples than most steps before
        losses.append(stack(*(whole[step.mine(rank)] for whole in batch_of(step))).item())
    return Seen(losses, gradients, repeats)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("late", "passes", "largest"),
    [
        (late, passes, largest)
        if (late, passes, largest) in ((False, 1, 5), (False, 2, 1), (True, 2, 5))
        else pytest.param(late, passes, largest, marks=pytest.mark.soak)
        for late, passes, largest in product((False, True), (1, 2), (1, 5))
    ],
)
def test_numbers_are_those_of_counted_steps(ranks: Pools, late: bool, passes: int, largest: int) -> None:
    """Also where batches grow, so that experts get more rows than in all steps before."""
    step = bounded("", batch=5, late=late)
    counted = replace(step, moe=replace(step.moe, bound_factor=None))
    ours, theirs = (ranks(2).run(several, each, passes, largest) for each in (step, counted))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=1e-12)
        check_all_close(mine.gradients, other.gradients, 1e-10)
        assert other.repeats == 0 and (mine.repeats > 0) == (largest > 1)
    assert len({seen.repeats for seen in ours}) == 1, "all ranks run the same steps again"
