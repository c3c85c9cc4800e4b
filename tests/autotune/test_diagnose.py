"""What has changed, read off records in which a known thing has changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.autotune.watch import Diagnosis, diagnose
from penstock.graph import Lane, Task
from penstock.mesh import Group, Mesh, Seconds
from penstock.ops import Op
from penstock.ops.core import Hop
from penstock.schedule import StepPlan
from penstock.step import StepShape
from penstock.timing import simulate
from penstock.trace import TaskRecord
from penstock.words import lane_words
from tests.steps import planned

RANKS, THRESHOLD = 4, 0.15
MESH = Mesh(world_size=RANKS, ep_size=RANKS, ep_local_size=2)
SHAPE = StepShape(
    moe_layers=(True, False, True),
    dispatch=(Hop(Op.DISPATCH, Group.EXPERT, Lane.INTER), Hop(Op.DISPATCH_SCATTER, Group.NODE)),
    pieces={"replicated": (2, 1, 3)},
)

Steps = list[list[TaskRecord]]
Factor = float | Seconds

ratios = st.one_of(st.floats(1.2, 10), st.floats(0.1, 0.8))


def plan() -> StepPlan:
    return planned("flowmoe", SHAPE)


def run(lanes: dict[Lane, Factor], compute: tuple[float, ...] = (1.0,) * RANKS, mesh: Mesh = MESH) -> Steps:
    """Records by rank of three simulated steps; factors of transfers by lane, of computation by rank."""
    found: Steps = [[] for _ in range(mesh.world_size)]
    step_plan = plan()

    def cost(task: Task) -> object:
        if task.lane is Lane.COMPUTE:
            return np.array(compute)
        return 0.5 * lanes.get(task.lane, 1.0)

    timeline = simulate(step_plan.schedule, step_plan.graph, cost, mesh)
    for record in timeline.records():
        found[record.rank] += [replace(record, step=step) for step in range(3)]
    return found


@given(ratios, st.sampled_from([Lane.INTER, Lane.INTRA]))
def test_slower_or_faster_links_of_one_lane(ratio: float, lane: Lane) -> None:
    found = diagnose(run({}), run({lane: ratio}), THRESHOLD, MESH, nodes=True)
    assert found.transfers[lane] == pytest.approx(ratio)
    assert found.compute == pytest.approx((1.0,) * RANKS)
    assert (found.links_changed, found.compute_changed) == (True, False)
    assert f"transfers over the {lane_words(lane, nodes=True)} take" in found.text


def test_links_of_one_group_of_several() -> None:
    mesh = Mesh(world_size=RANKS, ep_size=2)
    now = run({Lane.INTER: np.array([1.0, 1.0, 3.0, 3.0])}, mesh=mesh)
    assert diagnose(run({}, mesh=mesh), now, THRESHOLD, mesh).transfers[Lane.INTER] == pytest.approx(3.0)


@given(ratios, st.integers(0, RANKS - 1))
def test_one_rank_that_computes_slower_or_faster(ratio: float, rank: int) -> None:
    """The others wait for it in every collective; the transfers themselves are as they were."""
    factors = tuple(ratio if each == rank else 1.0 for each in range(RANKS))
    found = diagnose(run({}), run({}, factors), THRESHOLD, MESH)
    assert found.compute == pytest.approx(factors)
    assert found.compute_changed
    assert f"rank {rank}" in found.text and "all ranks" not in found.text


def test_waiting_for_a_slow_rank_is_no_slow_link() -> None:
    found = diagnose(run({}), run({}, (1.0, 4.0, 1.0, 1.0)), THRESHOLD, MESH)
    assert not found.links_changed


@given(st.floats(0.9, 1.1), st.floats(0.9, 1.1))
def test_small_differences_are_none(inter: float, compute: float) -> None:
    found = diagnose(run({}), run({Lane.INTER: inter}, (compute, 1.0, 1.0, 1.0)), THRESHOLD, MESH)
    assert not found.links_changed and not found.compute_changed
    assert found.text == ""


def test_groups_in_which_nothing_is_sent_say_nothing() -> None:
    alone = Mesh()
    found = diagnose(run({}, (1.0,), alone), run({Lane.INTER: 9.0}, (1.0,), alone), THRESHOLD, alone)
    assert found.transfers == {} and found.text == ""


def test_words() -> None:
    ratios = {Lane.INTER: 3.9, Lane.INTRA: 1.0}
    for nodes, where in ((True, "network between nodes"), (False, "network")):
        found = Diagnosis(transfers=ratios, compute=(2.0, 2.1), threshold=THRESHOLD, nodes=nodes)
        assert found.text == (
            f"transfers over the {where} take 3.90x as long as before, "
            "computation on all ranks takes 2.05x as long as before"
        )


def test_a_rank_that_became_faster_hides_none_that_became_slower() -> None:
    found = Diagnosis(transfers={}, compute=(0.5, 2.0, 1.0), threshold=THRESHOLD)
    slower, faster = found.text.split(", ")
    assert "rank 1 takes 2.00x" in slower and "rank 0 takes 0.50x" in faster
