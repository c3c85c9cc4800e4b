"""What ranks cannot share is refused; a plan that a stack refuses leaves the plan before it whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.config import ConfigError
from penstock.decision import PlacementConfig
from penstock.features.expert_replicas.feature import ExpertMoves
from penstock.moe import MoEConfig, build_layer
from penstock.moe.experts import ExpertShard
from penstock.runtime.features.expert_replicas.manager import ExpertReplicas
from penstock.runtime.parts import maker_of
from penstock.step.shape import ExpertForm
from penstock.topology import Layout as Place
from penstock.train.assemble import first_plan
from tests.support.cases import GATES, ORDERS, ROUTINGS, hosting_case
from tests.support.close import check_close
from tests.support.layouts import FORMS, Layout, tiny_case
from tests.support.parity import own_batch, stack_of
from tests.support.ranks import Pools
from tests.support.replicas import RandomReplicas, replicate_randomly, stack_with_replicas
from tests.support.searching import short_search

REPLICAS_OF_ALL = RandomReplicas(slots=2, pieces=2)
STEP = replace(hosting_case(2, ROUTINGS[0], "penstock"), padding=False)
BY_RANK = replace(STEP, moe=replace(STEP.moe, aux_loss_group="microbatch"))
"""Balance is judged by the samples of a rank, so none may move, which a plan cannot know."""


def step_after_a_refusal(rank: int, experts: ExpertMoves) -> None:
    """Plans with other replica slots, or none, that move samples, too."""
    stack = stack_with_replicas(rank, BY_RANK, REPLICAS_OF_ALL)
    replicate_randomly(stack, REPLICAS_OF_ALL, 0)
    tokens, labels = own_batch(rank, BY_RANK)
    before, plan = stack(tokens, labels).detach(), stack.plan
    placement = PlacementConfig(samples="netmoe", experts=experts, replica_slots=1)
    config = replace(BY_RANK.config, placement=placement)
    with short_search():
        other = first_plan(config, stack.machinery.layout, stack.base_shape, stack.gradients.sizes_bytes)
    replications = stack.of(ExpertReplicas).replications
    with pytest.raises(ValueError, match="samples cannot move"):
        stack.adopt(other)
    assert stack.plan is plan and stack.of(ExpertReplicas).replications == replications
    loss = stack(tokens, labels)
    check_close(loss.detach(), before, 1e-12, "loss")
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in stack.parameters() if p.grad is not None)


def test_a_plan_without_gradients_of_a_layer_is_refused_at_every_step() -> None:
    """One of when that layer was frozen; a second try would train with gradients that nobody sums."""
    case = tiny_case(1)
    stack, batch = stack_of(0, case), own_batch(0, case)
    whole, last = stack.plan, len(stack.parts.parts) - 1
    stack.requires_grad_(False)
    for parameter in stack.parts.replicated_parameters(last):
        parameter.requires_grad_()
    frozen = stack.replan()
    stack.requires_grad_()
    stack.replan()
    stack(*batch).backward()
    stack.adopt(frozen)
    for _ in range(2):
        with pytest.raises(ValueError, match="layer 0"):
            stack(*batch)
    stack.adopt(whole)
    stack(*batch).backward()


@pytest.mark.parametrize("experts", ["none", "planned"])
def test_a_step_after_a_plan_that_was_refused(ranks: Pools, experts: ExpertMoves) -> None:
    ranks(2).run(step_after_a_refusal, experts)


@pytest.mark.parametrize(
    ("moe", "layout", "forms", "key"),
    [
        (
            ORDERS["merged"],
            (4, 1, 2, 2),
            FORMS,
            "moe.one_copy_per_rank",
        ),
        ({"comm_dtype": "int8"}, (4, 1, 2, 2), FORMS, "parallel.etp_size"),
        (GATES["soft"], (4, 2, 4, 1), ("gather", "s1"), "moe.gate"),
    ],
)
def test_what_ranks_cannot_share_says_why(
    moe: dict[str, Any], layout: Layout, forms: tuple[ExpertForm, ...], key: str
) -> None:
    world_size, tp_size, ep_size, etp_size = layout
    config = MoEConfig(**{"num_experts": 8, "moe_ffn_hidden_size": 8} | moe)
    place = Place(world_size=world_size, tp_size=tp_size, ep_size=ep_size, etp_size=etp_size, rank=0)
    layer = build_layer(8, config, ep_size=ep_size, shard=ExpertShard(0, etp_size))
    for form in forms:
        with pytest.raises(ConfigError) as refused:
            maker_of(layer, place, form)
        assert refused.value.key == key
