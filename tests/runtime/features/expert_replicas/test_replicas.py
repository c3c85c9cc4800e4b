"""Experts as replicas of other ranks: whoever hosts whom, the steps are those of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook

from penstock.moe import SwiGLUExperts
from penstock.placement import SPLIT, Replication
from penstock.runtime.features.expert_replicas.manager import ExpertReplicas, check_takes_replicas
from penstock.step import StepShape
from penstock.topology import Layout as Place
from tests.support.cases import ROUTINGS, hosting_case
from tests.support.parity import Case, batch_of, own_batch
from tests.support.ranks import Pools
from tests.support.replicas import RandomReplicas, replicate_randomly, stack_with_replicas


def rows_computed(rank: int, case: Case, limit: int | None) -> int:
    """By this rank in a forward pass in which every expert is on both ranks."""
    stack = stack_with_replicas(rank, case, RandomReplicas(slots=4))
    held = [list(range(4, 8)), list(range(4))]
    layers = [layer for layer in stack.moe_layers if layer is not None]
    stack.of(ExpertReplicas).use(
        tuple(replace(Replication.local(layer.placement, held), limit=limit) for layer in layers)
    )
    rows: list[int] = []

    def count(module: Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        del given
        if isinstance(module, SwiGLUExperts) and module.num_local_experts == 4:  # no shared ones
            rows.append(len(out))

    hook = register_module_forward_hook(count)
    stack(*own_batch(rank, case))
    hook.remove()
    return sum(rows)


def test_every_slice_is_computed_by_halves(ranks: Pools) -> None:
    """Though one rank has three times as many rows as the other, which it would compute itself."""
    step = replace(hosting_case(2, ROUTINGS[0], "penstock"), batches=(6, 2))
    slices = 2 * 2 * 3  # of all layers and microbatches
    as_planned, exactly = (ranks(2).run(rows_computed, step, limit) for limit in (None, SPLIT))
    assert sum(as_planned) == sum(exactly)
    assert as_planned[0] == 3 * as_planned[1]
    assert abs(exactly[0] - exactly[1]) <= slices


def what_stays(rank: int, case: Case) -> list[bool]:
    """After each of three steps with replicas of their own: whether groups of ranks, program and parameters
    are those of before."""
    stack, hosts = stack_with_replicas(rank, case, RandomReplicas(slots=2)), RandomReplicas(slots=2)
    tokens, labels = batch_of(case)
    mine, found = case.mine(rank), []
    optimizer = torch.optim.AdamW(stack.parameters(), 1e-3)
    for step in range(4):
        replicate_randomly(stack, hosts, step)
        stack(tokens[mine], labels[mine]).backward()
        optimizer.step()
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        same = held == [*map(id, stack.parameters())]
        found.append((len(_world.pg_map), id(stack.program(training=True)), len(optimizer.state), same))
    return [each == found[0] and each[3] for each in found]


def test_other_replicas_need_no_new_groups_orders_or_optimiser_state(ranks: Pools) -> None:
    assert all(map(all, ranks(2).run(what_stays, hosting_case(2, ROUTINGS[0], "penstock"))))


def test_where_several_ranks_have_the_same_rows_replicas_are_refused() -> None:
    place = Place(world_size=4, ep_size=2, rank=0, node_size=0, tp_size=2, etp_size=2)
    shape = StepShape(moe_layers=(True,), replica_slots=1, expert_form="s2")
    with pytest.raises(ValueError, match="expert_form = s2 has the same rows on all ranks"):
        check_takes_replicas([None], shape, place)
