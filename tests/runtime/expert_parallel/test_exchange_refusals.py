"""What ExpertParallel and layers with it refuse, and what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import penstock
from penstock.config import ConfigError
from penstock.moe import GeluExperts, MergedPermutation, MoELayer, SoftmaxRouter, SortPermutation
from penstock.runtime.expert_parallel.exchange import ExpertParallel
from penstock.topology import CommunicationError
from tests.support.exchange import CHOICES, EXPERTS, HIDDEN, Case, exchange_of, model_of, numbers
from tests.support.ranks import Pools


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group before"):
        penstock.ExpertParallel(num_experts=8)


def built(rank: int, num_experts: int, options: dict[str, Any], dispatch: str) -> None:
    del rank
    model_of(Case(world=4, dispatch=dispatch), ExpertParallel(num_experts=num_experts, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_experts", "options", "dispatch", "told"),
    [
        (6, {}, "flat", ("moe.num_experts = 6", "evenly by 4 ranks", "Nearest valid: 8")),
        (8, {"ep_size": 3}, "flat", ("ep_size = 3", "must divide", "Nearest valid: 2")),
        (8, {"transport": "nvlink"}, "flat", ("transport", "direct, staged")),
        (8, {"ep_size": 0}, "flat", ("ep_size = 0", "Nearest valid: 1")),
        (8, {"ranks_per_node": 3}, "flat", ("ranks_per_node = 3", "must divide", "Nearest valid: 2")),
        (8, {}, "hierarchical_1d", ("hierarchical_1d", "over several nodes", "Use flat")),
        (8, {"ep_size": 2, "ranks_per_node": 2}, "hierarchical_2d", ("over several nodes", "Use flat")),
        (8, {"ep_size": 1}, "hierarchical_2d", ("over several nodes", "Use flat")),
    ],
)
def test_layouts_that_do_not_fit(
    ranks: Pools, num_experts: int, options: dict[str, Any], dispatch: str, told: tuple[str, ...]
) -> None:
    for message in ranks(4).told(ConfigError, built, num_experts, options, dispatch):
        assert all(part in message for part in told), message


def mismatched(rank: int, what: str) -> None:
    """A layer whose parts were built for another number of ranks; ranks with different numbers of tokens."""
    exchange = exchange_of(None, None)
    gate, order, local = SoftmaxRouter(HIDDEN, EXPERTS, CHOICES), SortPermutation(EXPERTS), EXPERTS // 2
    if what == "experts":
        MoELayer(gate=gate, permutation=order, expert=GeluExperts(HIDDEN, 5, EXPERTS), exchange=exchange)
    if what == "order":
        merged = MergedPermutation(EXPERTS, CHOICES, 1)
        MoELayer(gate=gate, permutation=merged, expert=GeluExperts(HIDDEN, 5, local), exchange=exchange)
    if what in ("index", "einsum"):
        layer = model_of(Case(world=2, order=what), exchange).layer
        layer(numbers(8 + 8 * rank, HIDDEN, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("experts", ("num_experts = 8", "2 rank(s) with 8 experts each hold 16")),
        ("order", ("MergedPermutation was built for ranks = 1", "ranks = 2")),
        ("index", ("different numbers of tokens", "`valid`")),
        ("einsum", ("different numbers of tokens", "`valid`")),
    ],
)
def test_parts_and_batches_that_do_not_fit(ranks: Pools, what: str, told: tuple[str, ...]) -> None:
    for message in ranks(2).told(ValueError, mismatched, what):
        assert all(part in message for part in told), message


def taken_by_one_rank(rank: int, half: str) -> str:
    """Rank 1 stays, since a connection that it closed would end the wait as well."""
    case, message = Case(world=2), ""
    model = model_of(case, ExpertParallel(num_experts=EXPERTS, timeout_s=2.0))
    x = numbers(8, HIDDEN, seed=rank).requires_grad_()
    out = model.layer(x) if half == "backward" else x
    dist.barrier()
    if rank == 0:
        with pytest.raises(CommunicationError) as caught:
            out.sum().backward() if half == "backward" else model.layer(x)
        message = str(caught.value)
    dist.barrier()
    return message


@pytest.mark.slow
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_pass_in_which_a_rank_takes_no_part_names_what_was_waited_for(ranks: Pools, half: str) -> None:
    message, _ = ranks(2).run(taken_by_one_rank, half)
    assert message.startswith("rank 0: ") and "of an MoE layer failed: " in message
