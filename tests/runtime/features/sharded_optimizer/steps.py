"""Several steps with a sharded optimiser and with a plain one, on the same ranks and batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.autotune.problem import assumed_problem
from penstock.decision import Decision
from penstock.plan import estimate_memory
from penstock.runtime import PipelinedStack, ShardedAdamW, clip_grad_norm_
from penstock.runtime.features.sharded_optimizer.share import MOMENTS
from penstock.schedule import plan_step, unit_cost
from penstock.train.assemble import build_optimizer, build_stack
from penstock.train.config import RunConfig
from tests.support.layers import scattered_layer
from tests.support.parity import (
    CLIP,
    Case,
    batch_of,
    check_equal_values,
    executed_as_planned,
    logical,
    machinery_of,
    prepare,
)
from tests.support.reference_moe import Weights
from tests.support.searching import short_search

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a training loop does beside steps.

    clips: by a norm that is small. in_backward: updates are tasks of the backward pass. passes: backward
    passes per step. freezes: gates, norms, in the second step. evaluates, replans: between steps, the
    latter with gradients in pieces of another size. releases: gradients are given up once they are summed.
    """

    clips: bool = True
    in_backward: bool = True
    passes: int = 1
    freezes: bool = False
    evaluates: bool = False
    replans: bool = False
    releases: bool = False


@dataclass(frozen=True)
class Trained:
    """Losses and norms by step, and parameters afterwards by logical name."""

    losses: list[float]
    norms: list[float]
    parameters: Weights


def config_of(case: Case, habits: Habits, *, sharded: bool) -> RunConfig:
    """The case's, with its optimiser."""
    config = case.config
    clip, releases = CLIP if habits.clips else None, sharded and habits.releases
    optimizer = replace(
        config.optimizer, zero_stage=(2 if releases else 1) if sharded else 0, clip_grad_norm=clip
    )
    return replace(config, optimizer=optimizer)


def build(rank: int, case: Case, habits: Habits, *, sharded: bool) -> tuple[PipelinedStack, Any]:
    """A stack with its optimiser, which is a ShardedAdamW if it is `sharded`."""
    found = machinery_of(rank, case)
    make_moe = partial(scattered_layer, case, found.layout) if case.scattered else None
    config = config_of(case, habits, sharded=sharded)
    with short_search():
        stack = build_stack(config, found, case.dtype, make_moe)
    prepare(stack, case)
    return stack, build_optimizer(stack, config.optimizer)


def loss_of(stack: PipelinedStack, rank: int, case: Case, number: int) -> Tensor:
    """The loss of one batch of several."""
    other = replace(case, seed=case.seed + 10 * number)
    (tokens, labels), mine, valid = batch_of(other), other.mine(rank), other.valid
    ids = torch.arange(len(tokens)) + number * len(tokens)
    loss: Tensor = stack(tokens[mine], labels[mine], ids[mine], None if valid is None else valid[mine])
    return loss


def train(rank: int, case: Case, habits: Habits, sharded: bool) -> Trained:
    """Three steps."""
    stack, optimizer = build(rank, case, habits, sharded=sharded)
    return go_on(stack, optimizer, rank, case, habits, range(STEPS))


def go_on(
    stack: PipelinedStack,
    optimizer: torch.optim.Optimizer,
    rank: int,
    case: Case,
    habits: Habits,
    steps: range,
) -> Trained:
    losses, norms = [], []
    for number in steps:
        _change(stack, habits, number)
        total = 0.0
        for each in range(habits.passes):
            loss = loss_of(stack, rank, case, habits.passes * number + each)
            last = each == habits.passes - 1
            if isinstance(optimizer, ShardedAdamW) and habits.in_backward and last:
                with optimizer.in_backward():
                    loss.backward()
            else:
                loss.backward()
            total += loss.item()
            assert executed_as_planned(stack)
        if isinstance(optimizer, ShardedAdamW):
            optimizer.step()
            assert all(p.grad is None for p in stack.parameters() if p.requires_grad)
            norms.append(float(optimizer.norm))
        else:
            norms.append(float(clip_grad_norm_(stack, CLIP if habits.clips else math.inf)))
            optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if habits.evaluates:
            stack.eval()
            losses.append(loss_of(stack, rank, case, 99).item())
            stack.train()
    if isinstance(optimizer, ShardedAdamW):
        optimizer.flush()
    check_equal_values(stack)
    parameters = {n: p.detach().clone() for n, p in stack.model.named_parameters()}
    return Trained(losses, norms, logical(stack, parameters))


def _change(stack: PipelinedStack, habits: Habits, number: int) -> None:
    if habits.freezes:
        for name, parameter in stack.model.named_parameters():
            if "gate" in name or "layernorm" in name:
                parameter.requires_grad_(number != 1)
    if habits.replans and number == 1:
        choice = Decision(schedule="flowmoe", microbatches=1, all_reduce_chunk_bytes=700)
        gradients = stack.gradients.sizes_bytes
        stack.adopt(plan_step(choice, stack.base_shape, gradients, lambda _: unit_cost))


def freezes_alone(rank: int, case: Case, alone: bool) -> Trained:
    """Two steps, between which the first rank may freeze everything for an evaluation of all ranks."""
    habits = Habits()
    stack, optimizer = build(rank, case, habits, sharded=True)
    go_on(stack, optimizer, rank, case, habits, range(1))
    stack.eval().requires_grad_(not (alone and rank == 0))
    loss_of(stack, rank, case, 99)
    stack.train().requires_grad_(True)
    return go_on(stack, optimizer, rank, case, habits, range(1, 2))


def moments_bytes(rank: int, case: Case, sharded: bool) -> tuple[int, int]:
    """What this rank keeps of AdamW's moments after a step, and what the planner thinks that it keeps."""
    stack, optimizer = build(rank, case, Habits(), sharded=sharded)
    loss_of(stack, rank, case, 0).backward()
    optimizer.step()
    config = config_of(case, Habits(), sharded=sharded)
    problem = assumed_problem(config, stack.machinery.layout)
    estimate = estimate_memory(problem, config.schedule.decision("flat")).optimizer_bytes
    if isinstance(optimizer, ShardedAdamW):
        return optimizer.updates.state_bytes, estimate
    states = optimizer.state.values()
    return sum(state[name].nbytes for state in states for name in MOMENTS), estimate
