"""Each peer's own package, on two real ranks."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.peers.entries import UPDATING, peer_notes
from penstock.lab.bench.contender import TransportName
from penstock.routing.sizes import capacity_slots
from penstock.topology import ParallelConfig
from tests.benchmarks.peers import steps
from tests.support.parity import Case
from tests.support.ranks import Pools, RankPool


@pytest.mark.few(2)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_both_columns_do_the_same(peer_ranks: Pools, peer: str, ep_size: int) -> None:
    """Two steps as shipped and two on Penstock's transport, in turns: the same bits.

    Gradients are synchronised: replicated ones are equal on all ranks, experts are only where they have
    replicas.
    """
    case = steps.case_of(ep_size=ep_size, num_experts=4, capacity_factor=1.25)
    ranks = peer_ranks(2).run(steps.both_columns, peer, case)
    (first, _), (second, _) = ranks
    for name, gradient in first.gradients.items():
        same = torch.equal(gradient, second.gradients[name])
        assert same is (ep_size == 1 or ".experts." not in name), name
        assert gradient.abs().max() > 0, name
    for shipped, receiving in ranks:
        assert all(math.isfinite(loss) for loss in shipped.losses)
        assert shipped.losses == receiving.losses
        assert shipped.losses[0] == shipped.losses[1], "gradients of an earlier step were not cleared"
        assert shipped.gradients.keys() == receiving.gradients.keys()
        for name, gradient in shipped.gradients.items():
            assert torch.equal(gradient, receiving.gradients[name]), name


def test_whole_iterations_leave_weights_where_they_are(peer_ranks: Pools, peer: str) -> None:
    """A learning rate of 0: every round does the same work, with the peer's own sharded optimiser."""
    if peer not in UPDATING:
        assert peer in peer_notes([peer])[0]
        return
    case = steps.case_of(num_experts=4, capacity_factor=1.25)
    for shipped, receiving, same in peer_ranks(2).run(steps.updates, peer, case):
        assert len(set(shipped)) == 1 and shipped == receiving and math.isfinite(shipped[0])
        assert same


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(steps.case_of(), id="the default: both of two experts, more slots than tokens"),
        pytest.param(steps.case_of(capacity_factor=None), id="dropless", marks=pytest.mark.soak),
        pytest.param(steps.case_of(num_experts=4, capacity_factor=None), id="dropless, two experts a rank"),
        pytest.param(
            steps.case_of(num_experts=4, capacity_factor=2.0),
            id="as many slots as tokens",
            marks=pytest.mark.soak,
        ),
        pytest.param(steps.case_of(num_experts=4, top_k=1, capacity_factor=4.0), id="one choice"),
        pytest.param(steps.case_of(ep_size=1, num_experts=4, capacity_factor=3.0), id="replicated experts"),
        pytest.param(steps.case_of(num_experts=4, capacity_factor=3.0, expert="swiglu"), id="swiglu"),
        pytest.param(steps.case_of(num_experts=6, top_k=3, capacity_factor=2.0), id="three choices"),
    ],
)
def test_same_weights_same_gradients_as_penstock(peer_ranks: Pools, peer: str, case: Case) -> None:
    """Where nothing is dropped, the peer computes what Penstock computes: same shapes, same work."""
    peer_ranks(2).run(steps.against_penstock, peer, case)


@pytest.mark.soak
@pytest.mark.parametrize("experts", [2, 4, 8])
def test_as_many_rows_travel_as_in_penstock(peer_ranks: Pools, peer: str, experts: int) -> None:
    case = steps.case_of(num_experts=experts, batch=4)
    slots = capacity_slots(case.batch * case.model.seq_len, experts, 2, 1.25, case.moe.min_capacity)
    transfers = 4 * case.model.num_layers  # dispatch and combine, forward and backward
    for seen in peer_ranks(2).run(steps.rows_on_the_wire, peer, case):
        hidden = [shape for shape in seen if len(shape) > 1]
        assert [math.prod(shape) for shape in hidden] == [experts * slots * 32] * transfers
        weights = [shape for shape in seen if len(shape) == 1]
        travelling = 2 * case.model.num_layers if peer == "megatron" else 0
        assert weights == [(experts * slots,)] * travelling


def test_only_the_column_penstock_bounds_send_buffers(peer_ranks: Pools, peer: str) -> None:
    for bounded, shipped in peer_ranks(2).run(steps.send_buffers, peer, steps.case_of()):
        assert bounded == {2 * ParallelConfig().send_buffer_bytes}, "Linux doubles what is asked"
        assert shipped
        assert not shipped & bounded


@pytest.mark.soak
def test_penstock_is_not_affected(peer_ranks: Pools, peer: str) -> None:
    peer_ranks(2).run(steps.penstock_beside, peer, steps.case_of())


@pytest.mark.soak
def test_nothing_is_left_behind(peer_ranks: Pools, peer: str) -> None:
    assert peer_ranks(2).run(steps.leaves_nothing, peer, steps.case_of()) == [[], []]


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["gloo", "penstock"])
def test_a_rank_that_fails_ends_the_others(peer: str, transport: TransportName) -> None:
    """The other rank ends with an error after the run's timeout, and torch is as it was on both."""
    pool = RankPool(2)
    try:
        seen = pool.run(steps.one_rank_fails, peer, steps.case_of(), transport)
    finally:
        pool.close()
    assert seen == [("RuntimeError", []), ("IndexError", [])]


def test_deepspeed_refuses_weights_it_would_scale(peer_ranks: Pools, peer: str) -> None:
    case = steps.unequal(steps.case_of(), norm_topk_prob=False)
    said = peer_ranks(2).run(steps.refused, peer, case)[0]
    assert said.startswith("moe.norm_topk_prob = ") if peer == "deepspeed" else said == "nothing"
