"""Loads that a step gathers: on every rank those of all ranks, of the steps that were trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from penstock.runtime.statistics import LoadHistory, Loads
from penstock.train.assemble import first_plan
from tests.support.layouts import tiny_case
from tests.support.parity import Case, batch_of, stack_of
from tests.support.ranks import Pools

CASE = tiny_case(
    4,
    num_layers=3,
    vocab_size=12,
    moe_layers=(0, 2),
    top_k=2,
    aux_loss_coeff=0.1,
    ep_size=2,
    batch=3,
    batches=(3, 1, 0, 4),
    padding=True,
)
SHARING = replace(CASE, tp_size=2, batches=(3, 1))


@dataclass(frozen=True)
class Told:
    """What a rank knows after two steps. gathered: of every step [P, Y, E]; chosen: [Y, E] of all ranks."""

    gathered: list[Loads]
    chosen: list[Loads]


def two_steps(rank: int, case: Case) -> Told:
    """Two training steps with an evaluation after each."""
    stack = stack_of(rank, case)
    shape, sizes = replace(stack.base_shape, gathers_loads=True), stack.gradients.sizes_bytes
    stack.adopt(first_plan(case.config, stack.machinery.layout, shape, sizes))
    tokens, labels = batch_of(case)
    mine, valid, chosen = case.mine(rank), case.valid, []
    assert valid is not None
    for turn in (0, 1):
        batch = tokens.roll(turn, dims=1)[mine], labels[mine], None, valid[mine]
        stack(*batch).backward()
        assert stack.statistics is not None
        chosen.append(stack.statistics.chosen_YE.int().numpy())
        with torch.no_grad():
            stack(*batch)
    return Told([stack.loads[at] for at in range(len(stack.loads))], chosen)


@pytest.mark.parametrize("case", [CASE, SHARING], ids=["dp", "tp"])
def test_every_rank_hears_the_loads_of_all(ranks: Pools, case: Case) -> None:
    told = ranks(4).run(two_steps, case)
    for each in told:
        assert [found.shape for found in each.gathered] == [(4, 2, 4)] * 2
        for found, first, chosen in zip(each.gathered, told[0].gathered, each.chosen, strict=True):
            assert np.array_equal(found, first)
            assert np.array_equal(found.sum(axis=0), chosen)
    if case is CASE:  # of every rank the rows of its own tokens, without padding
        assert case.valid is not None
        tokens = [int(case.valid[case.mine(rank)].sum()) for rank in range(4)]
        for found in told[0].gathered:
            assert found.sum(axis=2).tolist() == [[2 * n] * 2 for n in tokens]


def test_a_step_that_gathers_nothing_remembers_nothing() -> None:
    case = replace(CASE, world_size=1, ep_size=1, batches=(), padding=False)
    stack = stack_of(0, case)
    stack(*batch_of(case)).backward()
    assert stack.loads.last is None


def test_the_last_steps_are_kept() -> None:
    history = LoadHistory()
    for step in range(3):
        history.add(torch.full((1, 1, 2), step, dtype=torch.int32))
    assert [history[at].tolist() for at in range(len(history))] == [[[[1, 1]]], [[[2, 2]]]]
    assert history.last is not None and history.last is history[-1]
