"""Experts as guests of other ranks: whoever hosts whom, the steps are those of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.runtime.checks.guests import check_can_host
from penstock.step import StepShape
from penstock.topology import Layout as Place
from tests.runtime.test_moe_parity import JOINED, case
from tests.runtime.test_sample_moves import PLACERS
from tests.runtime.test_sample_moves import case as moving_case
from tests.steps import PLAIN
from tests.support.hosted import Hosts, check_hosted
from tests.support.layouts import Layout, layout_case
from tests.support.parity import Case
from tests.support.ranks import Pools

ROUTINGS = [("softmax raw", "sort"), ("noisy", "sort"), ("sigmoid", "merged"), ("deepseek", "merged")]
"""Gates whose choices tokens make, and the orders without fixed slots."""
DISPATCHES = ("flat", "hierarchical_1d", "hierarchical_2d")
EXPERTS = ("gelu", "swiglu", "module")


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


def test_where_several_ranks_have_the_same_rows_guests_are_refused() -> None:
    place = Place(world_size=4, ep_size=2, rank=0, node_size=0, mp_size=2, esp_size=2)
    shape = StepShape(moe_layers=(True,), guest_slots=1, expert_form="s2")
    with pytest.raises(ValueError, match="expert_form = s2 has the same rows on all ranks"):
        check_can_host([None], shape, place)
