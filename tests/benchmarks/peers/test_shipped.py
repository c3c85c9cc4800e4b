"""A schedule on Gloo's own all-to-all: the row of every rival that is as shipped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks.peers import shipped_stack
from penstock.lab.bench.config import BenchConfig
from penstock.lab.bench.scheduled import Stacks
from penstock.runtime import PipelinedStack
from penstock.schedule import SCHEDULES
from tests.lab.bench.test_field import config_of, layout_of
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Step:
    loss: float
    gradients: dict[str, Tensor]
    sent: Counter[int]


def step_of(stack: PipelinedStack, stacks: Stacks) -> Step:
    transport = stack.machinery.transports.inter
    before = transport.traffic.copy()
    loss = stack(*stacks.batch)
    loss.backward()
    gradients = {n: p.grad for n, p in stack.model.named_parameters() if p.grad is not None}
    for parameter in stack.model.parameters():
        parameter.grad = None
    return Step(loss.item(), gradients, transport.traffic - before)


def run_both_transports(rank: int, config: BenchConfig) -> tuple[Step, Step]:
    stacks = Stacks(config, layout_of(rank, config))
    shipped = shipped_stack(stacks)
    steps = step_of(stacks.real, stacks), step_of(shipped, stacks)
    shipped.close()
    stacks.close()
    return steps


@pytest.mark.every_value
@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("capacity", [1.25, None])
def test_the_shipped_transport_computes_the_same(ranks: Pools, name: str, capacity: float | None) -> None:
    """The same bits: the two move rows, and neither adds any."""
    config = config_of(schedules=(name,), capacity_factor=capacity)
    for ours, shipped in ranks(2).run(run_both_transports, config):
        assert ours.loss == shipped.loss and ours.sent == shipped.sent
        assert ours.gradients.keys() == shipped.gradients.keys() != set()
        for parameter, gradient in ours.gradients.items():
            assert torch.equal(gradient, shipped.gradients[parameter]), parameter
