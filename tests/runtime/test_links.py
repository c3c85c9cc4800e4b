"""Links as they are measured on real ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import AlphaBeta, ClusterConfig, FittedCluster, Span
from penstock.dispatch import DISPATCHES
from penstock.mesh import Group
from penstock.ops import Op
from penstock.runtime import links
from penstock.runtime.links import fit_all_reduce, fit_all_to_all, fit_links
from penstock.runtime.transport import Transports, build_transports
from penstock.topology import Control, Layout, ParallelConfig
from tests.runtime.transport.test_load import transport_of
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

DEVICES = ClusterConfig(flops_per_s=3e9, memory_bytes_per_s=5e8, task_overhead_s=7e-4)


def fit(rank: int, world_size: int) -> tuple[FittedCluster, float]:
    """The fit, and what an all-reduce behind it gives.

    Where other programs hold up the small messages only, a fit has no slope; then it is done again.
    """
    transport, control = transport_of(rank, world_size), Control(rank, world_size)
    layout = Layout(world_size=world_size, ep_size=world_size, rank=rank)
    found = fit_links(Transports(transport), layout, control, DEVICES)
    for _ in range(4):
        if min(found.dispatch.beta_s_per_byte, found.reduce.beta_s_per_byte) == 0:
            found = fit_links(Transports(transport), layout, control, DEVICES)
    total = torch.ones(1)
    transport.all_reduce(total, Group.WORLD)
    return found, total.item()


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_find_the_same_links(ranks: Pools, world_size: int) -> None:
    (found, total), *others = ranks(world_size).run(fit, world_size)
    assert all(other == (found, total) for other in others)
    assert total == world_size, "the transport is usable afterwards"
    for link in (found.dispatch, found.reduce):
        assert link.alpha_s >= 0 and link.beta_s_per_byte > 0
    assert found.all_to_all(world_size) == found.dispatch and found.all_reduce(world_size) == found.reduce


def test_devices_are_left_as_they_were_given(ranks: Pools) -> None:
    found, _ = ranks(2).run(fit, 2)[0]
    assert (found.flops_per_s, found.memory_bytes_per_s, found.task_overhead_s) == (3e9, 5e8, 7e-4)


def legs(rank: int, name: str) -> dict[tuple[str, str], AlphaBeta]:
    layout = Layout(world_size=4, ep_size=4, rank=rank, node_size=2)
    transports = build_transports(layout, torch.device("cpu"), ParallelConfig())
    found = fit_links(transports, layout, Control(rank, 4), DEVICES, [name])
    assert found.leg(name, Op.COMBINE, Span.regular(2, 2)) == found.legs[name, Op.DISPATCH], (
        "home by the same way"
    )
    assert found.leg("flat", Op.COMBINE, Span.regular(2, 2)) == found.dispatch
    return dict(found.legs)


@pytest.mark.parametrize("name", ["hierarchical_1d", "hierarchical_2d"])
def test_every_leg_of_a_dispatch_is_measured(ranks: Pools, name: str) -> None:
    first, *others = ranks(4).run(legs, name)
    assert list(first) == [(name, hop.op) for hop in DISPATCHES[name].hops]
    assert all(model.seconds(1 << 20) > 0 for model in first.values())
    assert all(other == first for other in others)


def traffic_of_a_fit(rank: int) -> tuple[int, int]:
    """Bytes sent while each collective was measured."""
    transport, control = transport_of(rank, 2), Control(rank, 2)
    fit_all_to_all(transport, control)
    exchanged = transport.traffic.total()
    fit_all_reduce(transport, control)
    return exchanged, transport.traffic.total() - exchanged


def test_as_many_bytes_travel_as_the_fit_is_told(ranks: Pools) -> None:
    """The argument of a model is the whole buffer: half stays at home, and a ring of two sends all of it."""
    times = links.REPEATS * (links.UNTIMED + links.IN_A_ROW)
    buffers = times * sum(links.SIZES_BYTES)
    assert ranks(2).run(traffic_of_a_fit) == [(buffers // 2, buffers)] * 2


@given(st.floats(0, 1e-2), st.floats(1e-10, 1e-6))
def test_a_link_without_noise_is_found_exactly(alpha_s: float, beta_s_per_byte: float) -> None:
    """The least squares alone: durations as a link with a start-up and a rate would give them."""
    wanted = AlphaBeta(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_timed", lambda move, elements, control: wanted.seconds(4 * elements))
        found = fit_all_reduce(None, Control(0, 1))  # type: ignore[arg-type]
    for size in links.SIZES_BYTES:
        assert np.isclose(found.seconds(size), wanted.seconds(size), rtol=1e-6)
