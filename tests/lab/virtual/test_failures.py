"""Virtual devices whose ranks disagree or lose each other end with an error that says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from penstock.graph import Lane
from penstock.lab.virtual import VirtualStack, build_virtual
from penstock.runtime import ScheduleMismatchError, TaskError
from penstock.schedule import Schedule, StepPlan
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import build_machinery
from tests.lab.virtual.test_stack import NAMES, SLEEPS, ZIPF, case_of, virtual_of
from tests.support.parity import Case
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow


def own_stack(rank: int, case: Case, seed: int) -> VirtualStack:
    """With groups of its own, which a failure leaves dead."""
    layout = Layout(world_size=case.world_size, ep_size=case.world_size, rank=rank)
    device = build_machinery(layout, torch.device("cpu"), ParallelConfig(timeout_s=300), "float32")
    return build_virtual(replace(case.config, cluster=SLEEPS), replace(ZIPF, seed=seed), device)


def fails(stack: VirtualStack, action: Callable[[], None]) -> str:
    try:
        action()
    except TaskError as error:
        return str(error)
    finally:
        stack.close()
        dist.barrier()
    return "no error"


def route_otherwise(rank: int, case: Case) -> str:
    """The last rank draws from another seed."""
    stack = own_stack(rank, case, seed=int(rank == case.world_size - 1))
    return fails(stack, lambda: stack.step(0))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_route_differently_end_with_an_error(ranks: Pools, name: str) -> None:
    """Long before the groups' timeout: other splits than the partners' would wait for bytes forever."""
    messages = ranks(4).run(route_otherwise, case_of(name))
    assert all(message.startswith(f"rank {rank}: task L0.") for rank, message in enumerate(messages))
    assert any("the partners have routed their tokens otherwise" in message for message in messages)


def lose_the_network(rank: int, case: Case) -> str:
    """One rank's connections are cut before its second step."""
    stack = own_stack(rank, case, seed=0)
    stack.step(0)
    dist.barrier()
    if rank == 1:
        stack.machinery.transports.inter.abort()
    return fails(stack, lambda: stack.step(1))


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_a_cut_network_ends_the_step_of_every_rank(ranks: Pools, capacity_factor: float | None) -> None:
    messages = ranks(4).run(lose_the_network, case_of("penstock", capacity_factor=capacity_factor))
    for rank, message in enumerate(messages):
        assert message.startswith(f"rank {rank}: task L")
        assert "failed on lane inter" in message.splitlines()[0]
        assert ">" in message


def adopt_another_order(rank: int, case: Case) -> str:
    """Two tasks of the last rank's order are exchanged."""
    stack = virtual_of(rank, case)
    plan = stack.plan
    lanes = dict(plan.schedule.lanes)
    first, second, *rest = lanes[Lane.COMPUTE]
    if rank == case.world_size - 1:
        lanes[Lane.COMPUTE] = (second, first, *rest)
    try:
        stack.adopt(StepPlan(plan.graph, Schedule(plan.schedule.name, lanes), plan.shape))
    except ScheduleMismatchError as error:
        return str(error)
    return "no error"


def test_another_order_on_one_rank_is_refused(ranks: Pools) -> None:
    for message in ranks(2).run(adopt_another_order, case_of(world_size=2, ep_size=2)):
        assert "lane compute, place 0: rank 0 runs L0.EM.m0.F, rank 1 runs L0.EM.m1.F" in message
