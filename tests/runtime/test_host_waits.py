"""Steps on a GPU that stands in for one: their numbers, what would fail on a GPU, and what the host waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from penstock.device import using
from tests.support.card import CardDevice, Wait, counted, install
from tests.support.layouts import layout_case
from tests.support.parity import Case, StepResult, check_result, merge, result_of, stack_of
from tests.support.ranks import Pools

STEPS = 3


@dataclass(frozen=True)
class Carded:
    """The first step's result, and what the host waited for in the last."""

    result: StepResult
    waits: dict[Wait, int]


def step_on_card(rank: int, case: Case, kernel: bool) -> Carded:
    """Run steps on this rank's stand-in for a GPU. kernel: whether it has grouped kernels."""
    device = install()
    with using(CardDevice(kernel=kernel)):
        stack = stack_of(rank, replace(case, card=True))
        first = result_of(stack, rank, case)
        tokens = None
        for _ in range(STEPS - 2):
            result_of(stack, rank, case)
        with counted() as waits:
            result_of(stack, rank, case)
        return Carded(first, dict(waits))


@pytest.mark.parametrize("schedule", ["sequential", "flowmoe", "fsmoe", "penstock"])
def test_explore(ranks: Pools, schedule: str) -> None:
    case = layout_case((2, 1, 2, 1), schedule, "gather")
    done = ranks(2).run(step_on_card, case, False)
    for key, count in sorted(done[0].waits.items()):
        print(count, key)
    check_result(merge([each.result for each in done]), case)
