"""Experts as guests of other ranks: whoever hosts whom, the steps are those of the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook

from penstock.moe import SwiGLUExperts
from penstock.placement import SPLIT, Hosting
from penstock.runtime.checks.guests import check_can_host
from penstock.step import StepShape
from penstock.topology import Layout as Place
from tests.runtime.test_moe_parity import JOINED, case
from tests.runtime.test_sample_moves import PLACERS
from tests.runtime.test_sample_moves import case as moving_case
from tests.steps import PLAIN
from tests.support.hosted import Hosts, check_hosted, host_randomly, hosted_stack
from tests.support.layouts import Layout, layout_case
from tests.support.parity import Case, batch_of
from tests.support.placers import RandomHomes
from tests.support.ranks import Pools

ROUTINGS = [("softmax raw", "sort"), ("noisy", "sort"), ("sigmoid", "merged"), ("deepseek", "merged")]
"""Gates whose choices tokens make, and the orders without fixed slots."""
DISPATCHES = ("flat", "hierarchical_1d", "hierarchical_2d")
EXPERTS = ("gelu", "swiglu", "module")


def soak(layout: Layout) -> Any:
    """For `make soak` alone."""
    return pytest.param(layout, marks=pytest.mark.soak)


def hosting_case(
    world_size: int, routing: tuple[str, str], schedule: str, dispatch: str = "flat", experts: str = "swiglu"
) -> Case:
    """Two MoE layers, with everything cut that can be cut."""
    step = case(world_size, *routing, dispatch, experts, schedule)
    return replace(step, model=replace(step.model, num_layers=2))


def test_two_ranks(ranks: Pools) -> None:
    check_hosted(
        ranks, replace(hosting_case(2, ROUTINGS[0], "penstock"), scattered=True), Hosts(slots=2, pieces=3)
    )


def rows_computed(rank: int, case: Case, limit: int | None) -> int:
    """By this rank in a forward pass in which every expert is on both ranks."""
    stack = hosted_stack(rank, case, Hosts(slots=4))
    held = [list(range(4, 8)), list(range(4))]
    layers = [layer for layer in stack.moe_layers if layer is not None]
    stack.host_guests([replace(Hosting.local(layer.placement, held), limit=limit) for layer in layers])
    rows: list[int] = []

    def count(module: Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        del given
        if isinstance(module, SwiGLUExperts) and module.num_local_experts == 4:  # no shared ones
            rows.append(len(out))

    tokens, labels = batch_of(case)
    mine = case.mine(rank)
    hook = register_module_forward_hook(count)
    stack(tokens[mine], labels[mine])
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
    """After each of three steps with guests of their own: whether groups of ranks, program and parameters are
    those of before."""
    stack, hosts = hosted_stack(rank, case, Hosts(slots=2)), Hosts(slots=2)
    tokens, labels = batch_of(case)
    mine, found = case.mine(rank), []
    optimizer = torch.optim.AdamW(stack.parameters(), 1e-3)
    for step in range(4):
        host_randomly(stack, hosts, step)
        stack(tokens[mine], labels[mine]).backward()
        optimizer.step()
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        same = held == [*map(id, stack.parameters())]
        found.append((len(_world.pg_map), id(stack.program(training=True)), len(optimizer.state), same))
    return [each == found[0] and each[3] for each in found]


def test_other_guests_need_no_new_groups_orders_or_optimiser_state(ranks: Pools) -> None:
    assert all(map(all, ranks(2).run(what_stays, hosting_case(2, ROUTINGS[0], "penstock"))))


def test_one_copy_per_node(ranks: Pools) -> None:
    """Where an expert is on several nodes, a row goes to the one that its rank's part of rows has."""
    step = hosting_case(4, ROUTINGS[0], "penstock", JOINED)
    check_hosted(ranks, replace(step, padding=True), Hosts(slots=2, pieces=2))


@pytest.mark.slow
@pytest.mark.every_value
@pytest.mark.parametrize("schedule", PLAIN)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("experts", EXPERTS)
def test_several_ranks(
    ranks: Pools, routing: tuple[str, str], schedule: str, dispatch: str, experts: str
) -> None:
    step = hosting_case(4, routing, schedule, dispatch, experts)
    hosts = Hosts(slots=3, pieces=2) if dispatch == "flat" else Hosts()
    check_hosted(ranks, replace(step, padding=hosts.slots > 1), hosts)


@pytest.mark.slow
@pytest.mark.every_value
@pytest.mark.parametrize("schedule", PLAIN)
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("placer", PLACERS)
def test_samples_move_too(ranks: Pools, schedule: str, dispatch: str, placer: str) -> None:
    step = moving_case(4, schedule, dispatch=dispatch, placer=PLACERS[placer], padding=dispatch == "flat")
    check_hosted(ranks, step, Hosts(slots=2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(4, 1, 2, 1), (4, 2, 4, 1), (4, 1, 2, 2), (4, 2, 2, 2)])
def test_ranks_that_share_experts_or_attention(ranks: Pools, layout: Layout) -> None:
    """Replicas are summed after guests came home; shards of an expert are guests of the same shards."""
    check_hosted(ranks, layout_case(layout, "penstock", "gather"), Hosts(slots=2, pieces=2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(4, 2, 2, 2), *map(soak, ((4, 2, 4, 1), (4, 1, 2, 2)))])
def test_samples_and_experts_move_where_ranks_share(ranks: Pools, layout: Layout) -> None:
    """A sample's home is all ranks that share its tokens; a guest is hosted by all shards of its expert."""
    step = replace(layout_case(layout, "penstock", "gather"), placer=RandomHomes())
    check_hosted(ranks, step, Hosts(slots=2, pieces=2))


def test_where_several_ranks_have_the_same_rows_guests_are_refused() -> None:
    place = Place(world_size=4, ep_size=2, rank=0, node_size=0, tp_size=2, etp_size=2)
    shape = StepShape(moe_layers=(True,), replica_slots=1, expert_form="s2")
    with pytest.raises(ValueError, match="expert_form = s2 has the same rows on all ranks"):
        check_can_host([None], shape, place)
