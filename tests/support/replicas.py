"""Several steps of a stack whose ranks host random replicas, and the same steps by the plain reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import torch

from penstock.features.expert_replicas.feature import ExpertMoves
from penstock.placement import EMPTY, SPLIT, ExpertPlacement, Part, Replication
from penstock.runtime import PipelinedStack, clip_grad_norm_
from penstock.runtime.features.expert_replicas.manager import ExpertMoving, ExpertReplicas
from penstock.train.assemble import first_plan
from tests.support.parity import (
    CLIP,
    Case,
    StepResult,
    check_result,
    executed_as_planned,
    gradients_of,
    logical,
    merge,
    own_samples,
    parts_of,
    reference_case,
    reference_steps,
    stack_of,
)
from tests.support.reference_moe import Weights
from tests.support.searching import short_search

RATE = 0.1


@dataclass(frozen=True)
class RandomReplicas:
    """How experts are in use. slots, pieces: of replicas. steps: each hosts others. seed: of which rank holds
    which replica.

    slots: 0 = experts stay. limits: of replications, in turn. moving: plans which rank holds which replica,
    instead of chance.
    fresh: after every step each expert is chosen as another one was before.
    """

    slots: int = 1
    pieces: int = 1
    steps: int = 2
    seed: int = 0
    limits: tuple[int | None, ...] = (SPLIT, None, 5 * SPLIT // 4)
    moving: ExpertMoving | None = None
    fresh: bool = False


def random_replication(placement: ExpertPlacement, slots: int, random: Random) -> Replication:
    """Any replicas anywhere, and any split of rows among those that have an expert."""
    replicas = [_some(placement, rank, slots, random) for rank in range(placement.ranks)]
    replication = Replication.local(placement, replicas)
    if random.random() < 0.3:
        return replication
    at: dict[int, list[int]] = {}
    for position, expert in enumerate(replication.by_position):
        at.setdefault(expert, []).append(position)
    splits = tuple(
        tuple(_split(at[expert], random) for expert in range(placement.num_experts))
        for _ in range(placement.ranks)
    )
    return replace(replication, splits=splits)


def _some(placement: ExpertPlacement, rank: int, slots: int, random: Random) -> list[int]:
    others = [e for e in range(placement.num_experts) if e not in placement.held(rank)]
    random.shuffle(others)
    found = [*others[:slots], *[EMPTY] * (slots - len(others))]
    return [EMPTY if random.random() < 0.2 else expert for expert in found]


def _split(positions: Sequence[int], random: Random) -> tuple[Part, ...]:
    chosen = random.sample(positions, random.randint(1, len(positions)))
    cuts = sorted(random.sample(range(1, SPLIT), len(chosen) - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, SPLIT], strict=True)]
    return tuple(Part(position, size) for position, size in zip(chosen, sizes, strict=True))


def replicate_randomly(stack: PipelinedStack, hosts: RandomReplicas, step: int) -> None:
    """The same random replicas on all ranks, others in every step and layer, their rows split in all ways."""
    stack.of(ExpertReplicas).use(
        tuple(
            None
            if layer is None
            else replace(
                random_replication(layer.placement, hosts.slots, Random(f"{hosts.seed} {step} {n}")),
                limit=hosts.limits[(step + n) % len(hosts.limits)],
            )
            for n, layer in enumerate(stack.moe_layers)
        )
    )


def stack_with_replicas(rank: int, case: Case, hosts: RandomReplicas) -> PipelinedStack:
    """The case's stack, with room for replicas."""
    stack = stack_of(rank, case)
    experts: ExpertMoves = "planned" if hosts.slots else "none"
    placement = replace(case.config.placement, experts=experts, replica_slots=max(1, hosts.slots))
    config = replace(case.config, placement=placement)
    shape = replace(stack.base_shape, replica_pieces=hosts.pieces)
    stack.of(ExpertReplicas).moving = hosts.moving
    with short_search():
        stack.adopt(first_plan(config, stack.machinery.layout, shape, stack.gradients.sizes_bytes))
    return stack


def hosted_steps(rank: int, case: Case, hosts: RandomReplicas) -> list[StepResult]:
    """Steps on this rank, each with other replicas, and an evaluation before each."""
    stack = stack_with_replicas(rank, case, hosts)
    optimizer = torch.optim.SGD(stack.parameters(), RATE)
    batch, _ = own_samples(rank, case)
    found = []
    for step in range(hosts.steps):
        if hosts.slots and hosts.moving is None:
            replicate_randomly(stack, hosts, step)
        with torch.no_grad():
            judged = stack(*batch)
        loss = stack(*batch)
        assert torch.equal(judged, loss.detach())
        loss.backward()
        gradients = gradients_of(stack.model)
        norm = float(clip_grad_norm_(stack, CLIP))
        optimizer.step()
        optimizer.zero_grad()
        after = {n: p.detach().clone() for n, p in stack.model.named_parameters()}
        done = executed_as_planned(stack)
        if hosts.fresh:
            turn_gates(dict(stack.model.named_parameters()))
        found.append(
            StepResult(
                loss.item(), norm, logical(stack, gradients), logical(stack, after), done, parts_of(stack)
            )
        )
    return found


@torch.no_grad()
def turn_gates(parameters: Weights) -> None:
    """Every expert is chosen as another one was."""
    for name, parameter in parameters.items():
        if name.endswith("gate.weight"):
            parameter.copy_(parameter.roll(3, dims=0))


def sgd_step(weights: Weights, gradients: Weights, scale: float) -> Weights:
    return {name: w.detach() - RATE * scale * gradients[name] for name, w in weights.items()}


@lru_cache(maxsize=16)
def plain_steps(alone: Case, steps: int, fresh: bool) -> list[StepResult]:
    """The same by the reference, in one process, of what `reference_case` says."""
    return list(reference_steps(alone, sgd_step, steps, turn_gates if fresh else None))


def check_hosted(pools: Any, case: Case, hosts: RandomReplicas) -> None:
    """Run the case on real ranks, and compare every step with the reference."""
    ranks = pools(case.world_size).run(hosted_steps, case, hosts)
    expected = plain_steps(reference_case(case), hosts.steps, hosts.fresh)
    for found, wanted in zip(zip(*ranks, strict=True), expected, strict=True):
        check_result(merge(list(found)), case, wanted)
