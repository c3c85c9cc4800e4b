"""Steps with a sharded optimiser equal steps with a plain one, whatever the layout, the loop and the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from penstock.schedule import SCHEDULES
from penstock.step.shape import Recompute
from tests.runtime.features.sharded_optimizer.steps import (
    STEPS,
    Habits,
    Trained,
    freezes_alone,
    moments_bytes,
    train,
)
from tests.support.cases import AXES
from tests.support.close import check_all_close
from tests.support.layouts import Layout, layout_case
from tests.support.pairwise import valuewise
from tests.support.parity import Case
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

LAYOUTS: tuple[Layout, ...] = ((2, 1, 1, 1), (2, 2, 1, 2), (4, 1, 2, 1), (4, 2, 2, 1))
RULES = ("sequential", "dense_overlap", "fsmoe", "parm_s2", "penstock")
"""Schedules of which each orders updates by a rule of its own."""

LOOPS = {
    "tasks": Habits(),
    "no clipping": Habits(clips=False),
    "ordinary": Habits(in_backward=False, passes=2),
    "accumulating": Habits(passes=2, evaluates=True),
    "freezing": Habits(freezes=True, in_backward=False),
    "changing plan": Habits(replans=True, freezes=True, evaluates=True, clips=False, in_backward=False),
}


def check_same(ours: list[Trained], plain: list[Trained]) -> None:
    for mine, theirs in zip(ours, plain, strict=True):
        assert len(mine.norms) == STEPS
        assert mine.norms == pytest.approx(theirs.norms, rel=1e-10)
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-10)
        check_all_close(mine.parameters, theirs.parameters, 1e-10)


def case_of(layout: Layout, schedule: str, **settings: Any) -> Case:
    found = layout_case(layout, schedule, SCHEDULES[schedule].expert_form or "gather", **settings)
    # Gradients come from two microbatches; chunks of them would only make more tasks before the same sums.
    return replace(found, schedule=replace(found.schedule, chunks=1, all_reduce_chunk_bytes=4096))


def _fits(known: Mapping[str, Any]) -> bool:
    if not {"layout", "schedule"} <= known.keys():
        return True
    _, tp, _, etp = known["layout"]
    return tp * etp > 1 or SCHEDULES[known["schedule"]].expert_form in (None, "gather")


@pytest.mark.few(3)
@valuewise(
    _fits,
    layout=LAYOUTS,
    loop=LOOPS,
    schedule=RULES,
    releases=(False, True),
    recompute=("none", "blocks"),
    bounds=AXES["bounds"],
)
def test_three_steps(
    ranks: Pools, layout: Layout, loop: str, schedule: str, releases: bool, recompute: Recompute, bounds: str
) -> None:
    """In which what else a step may be, see `tests.support.cases`, matters to the next one.

    Parameters are gathered for the first run of what is recomputed, and updated after the second. Updates
    cannot be taken back: ranks look whether rows were exceeded before backward begins.
    """
    layers = 3 if releases else 2  # two may have gradients at the same time
    plain = case_of(layout, schedule, num_layers=layers)
    case = replace(plain, recompute=recompute)
    if bounds != "counted":
        early = "early" in bounds
        how: Any = bounds.split(",", maxsplit=1)[0]
        moe = replace(case.moe, bound_factor=1.25)
        case = replace(case, moe=moe, bounds=how, late=not early)
    pool, habits = ranks(case.world_size), replace(LOOPS[loop], releases=releases)
    wanted = pool.run(train, plain, habits, False)
    check_same(pool.run(train, case, habits, True), wanted)


def test_a_rank_that_freezes_for_an_evaluation_exchanges_nothing_alone(ranks: Pools) -> None:
    """The others would not join it, so the next step would never end."""
    case = case_of((2, 1, 1, 1), "flowmoe")
    together, ours = (ranks(2).run(freezes_alone, case, alone) for alone in (False, True))
    for mine, theirs in zip(ours, together, strict=True):
        assert (mine.losses, mine.norms) == (theirs.losses, theirs.norms)


@pytest.mark.parametrize("layout", [(4, 1, 2, 1), (4, 2, 1, 2)], ids=str)
def test_moments_take_what_theory_says(ranks: Pools, layout: Layout) -> None:
    """Of what is replicated a part for each data-parallel rank, of experts one for each replica."""
    case = replace(case_of(layout, "flowmoe"), double=False)
    world, tp, ep, etp = layout
    plain, ours = (ranks(world).run(moments_bytes, case, sharded) for sharded in (False, True))
    for (held, estimate), (share, shared) in zip(plain, ours, strict=True):
        assert held == pytest.approx(estimate, rel=0.02)
        assert share == pytest.approx(shared, rel=0.02)
        assert share <= held / min(world / tp, world / (ep * etp)) * 1.02
