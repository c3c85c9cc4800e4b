"""Samples and experts that move, alone and together: every schedule and layout, real and adversarial routing.

`make test` has pairs of these values, in tests of their own; here they all meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from penstock.mesh import Group
from penstock.step.shape import ExpertForm, TokenLayout
from tests.runtime.test_guests import ROUTINGS as GATES
from tests.runtime.test_guests import hosting_case
from tests.runtime.test_moe_parity import DISPATCHES, JOINED
from tests.runtime.test_moving import small
from tests.runtime.test_sample_moves import case as moving_case
from tests.steps import PLAIN
from tests.support.hosted import Hosts, check_hosted
from tests.support.layouts import engines, layout_case
from tests.support.parity import Case
from tests.support.placers import RandomHomes
from tests.support.ranks import Pools

MOVES = ("samples", "experts", "both")
REPLICAS = "replicas"
SHARED: dict[str, tuple[tuple[int, int, int, int], TokenLayout]] = {
    "tp 2": ((4, 2, 4, 1), "split"),
    "tp 2, whole samples": ((4, 2, 4, 1), "replicated"),
    "etp 2": ((4, 1, 2, 2), "split"),
    "tp 2, etp 2": ((4, 2, 2, 2), "split"),
    "tp 2, etp 2, whole samples": ((4, 2, 2, 2), "replicated"),
}
ROUTINGS: dict[str, dict[str, Any]] = {
    "real": {},
    "one node": {"busy_experts": (0, 1, 2, 3)},
    "one expert": {"busy_experts": (5,)},
    "fresh": {},
    "a rank without samples": {},
}


def plans(moves: str) -> Iterator[tuple[str, str, ExpertForm]]:
    """Layouts, schedules and forms under which samples, experts or both may move."""
    alone = (JOINED,) if moves == "experts" else ()  # a row for several experts has several homes
    yield from ((layout, name, "gather") for layout, name in product((*DISPATCHES, REPLICAS, *alone), PLAIN))
    forms = ("gather", "s1") if moves == "experts" else ("gather",)
    for layout, (name, form) in product(SHARED, engines()):
        if form == "gather" or (form in forms and SHARED[layout][0][3] > 1):
            yield layout, name, form


def case_of(moves: str, layout: str, schedule: str, form: ExpertForm, routing: str) -> Case:
    """Two MoE layers, with everything cut that can be cut; two nodes, where ranks share nothing."""
    own: dict[str, Any] = {"placer": None if moves == "experts" else RandomHomes()}
    if layout in SHARED:
        numbers, tokens = SHARED[layout]
        found = layout_case(numbers, schedule, form, tokens=tokens, **own)
    elif layout == JOINED:
        found = hosting_case(4, GATES[0], schedule, JOINED)
    elif layout == REPLICAS:
        found = moving_case(4, schedule, ep_size=2, node_size=None, **own)
    else:
        found = moving_case(4, schedule, dispatch=layout, **own)
    if routing == "a rank without samples":
        found = replace(found, batches=(3, 0, 1, 4)[: found.mesh.size(Group.DATA)], padding=True)
    return replace(found, **ROUTINGS[routing])


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("moves", "layout", "schedule", "form"), [(moves, *plan) for moves in MOVES for plan in plans(moves)]
)
def test_two_steps(
    ranks: Pools, moves: str, layout: str, schedule: str, form: ExpertForm, routing: str
) -> None:
    """Guests are random, and those that a planner finds where the second step is routed otherwise."""
    step, fresh = case_of(moves, layout, schedule, form, routing), routing == "fresh"
    moving = small(step.holders, "least_loaded") if fresh and moves != "samples" else None
    check_hosted(ranks, step, Hosts(slots=0 if moves == "samples" else 2, fresh=fresh, moving=moving))
