"""The exact formula against the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Graph, Lane, Phase
from penstock.mesh import Group, Mesh
from penstock.ops import Op
from penstock.ops.core import Hop
from penstock.plan.published import Linear, MoEPart, common_degree, makespan_s
from penstock.plan.published.degree import Degree, exact, idle_s
from penstock.step import StepShape
from penstock.timing import simulate
from tests.plan.published.layers import parts, random_linear, random_part, random_reduce_s
from tests.steps import planned

CASES = 10_000
DEGREES = range(1, 9)
LEGS = (Hop(Op.DISPATCH, Group.EXPERT, Lane.INTER), Hop(Op.DISPATCH_SCATTER, Group.NODE))
CHAIN = (Op.DISPATCH, Op.DISPATCH_SCATTER, Op.EXPERTS, Op.COMBINE_GATHER, Op.COMBINE)
F, B = Phase.FORWARD, Phase.BACKWARD

Seconds = npt.NDArray[np.float64]


def simulated_s(cases: list[tuple[MoEPart, float]], degree: int, phase: Phase) -> Seconds:
    """The MoE part of layer 0 in FSMoE's schedule, with the gradients of a dense block above in its gap.

    Every case is a rank that meets no other. Tasks that are not of the part take no time.
    """
    shape = StepShape(
        moe_layers=(True, False), exchange_counts=False, dispatch=LEGS, pieces={"replicated": (0, 4)}
    )
    plan = planned("fsmoe", shape, chunks=degree)
    chain = CHAIN if phase is F else tuple(reversed(CHAIN))
    a2a_s, ag_s, rs_s, experts_s = np.array([part.chunk_s(degree) for part, _ in cases]).T
    of_chain = (a2a_s, ag_s, experts_s, rs_s, a2a_s)
    seconds = {(op, phase): column for op, column in zip(chain, of_chain, strict=True)}
    seconds[Op.ALL_REDUCE, B] = np.array([reduce_s for _, reduce_s in cases])
    graph = Graph(tuple(replace(task, axes=()) for task in plan.graph.tasks))
    lanes = {
        lane: tuple(graph.by_name[task.name] for task in order) for lane, order in plan.schedule.lanes.items()
    }
    zeros = np.zeros(len(cases))
    timeline = simulate(
        replace(plan.schedule, lanes=lanes),
        graph,
        lambda task: seconds.get((task.op, task.phase), zeros),
        Mesh(world_size=len(cases)),
    )
    latest: Seconds = np.max([interval.end for interval in timeline.times.values()], axis=0)
    return latest


@pytest.mark.slow
@pytest.mark.parametrize("phase", [F, B])
def test_the_exact_degree_is_that_of_brute_force_by_simulation(phase: Phase) -> None:
    rng = random.Random(f"degree {phase}")
    cases = [
        (random_part(rng, alike=rng.random() < 0.5), random_reduce_s(rng) if phase is B else 0.0)
        for _ in range(CASES)
    ]
    simulated = np.array([simulated_s(cases, degree, phase) for degree in DEGREES])
    formula = np.array([[makespan_s(part, r, reduce_s) for part, reduce_s in cases] for r in DEGREES])
    np.testing.assert_allclose(formula, simulated, rtol=1e-12)
    found = [exact(part, reduce_s, DEGREES) for part, reduce_s in cases]
    best_s = simulated.min(axis=0)
    chosen_s = simulated[[degree.chunks - 1 for degree in found], np.arange(CASES)]
    np.testing.assert_allclose([degree.seconds for degree in found], best_s, rtol=1e-12)
    np.testing.assert_allclose(chosen_s, best_s, rtol=1e-12)


def test_of_equally_good_degrees_the_smallest_is_taken() -> None:
    free = Linear(linear_s=1.0)
    part = MoEPart(a2a=Linear(), experts=free)
    assert exact(part, 0.0, (4, 6)) == Degree(chunks=4, seconds=1.0)
    assert exact(part) == Degree(chunks=1, seconds=1.0)


@given(part=parts, degree=st.integers(1, 8), reduce_s=st.floats(0, 5))
def test_reductions_are_free_until_the_network_between_nodes_is_full(
    part: MoEPart, degree: int, reduce_s: float
) -> None:
    solo_s, spare_s = makespan_s(part, degree), idle_s(part, degree)
    assert spare_s >= 0
    longer_s = max(0.0, reduce_s - spare_s)
    assert makespan_s(part, degree, reduce_s) == pytest.approx(solo_s + longer_s, abs=1e-12)


def test_backward_doubles_what_experts_take_and_not_four_times() -> None:
    part = random_part(random.Random(3))
    back = part.backward
    assert (back.a2a, back.ag, back.rs) == (part.a2a, part.ag, part.rs)
    for degree in DEGREES:
        assert back.experts.chunk_s(degree) == pytest.approx(2 * part.experts.chunk_s(degree))


def test_under_a_long_reduction_start_ups_are_all_that_counts() -> None:
    part = MoEPart(a2a=random_linear(random.Random(4)), experts=Linear(alpha_s=1e-3, linear_s=1.0))
    assert exact(part, 0.0, DEGREES).chunks > 1
    assert exact(part, 1e3, DEGREES).chunks == 1


def test_a_common_degree_is_the_best_for_the_sum() -> None:
    rng = random.Random(5)
    shared = [(random_part(rng), random_reduce_s(rng)) for _ in range(4)]
    found = common_degree(shared, DEGREES)
    sums = [sum(makespan_s(part, degree, reduce_s) for part, reduce_s in shared) for degree in DEGREES]
    assert found.seconds == sums[found.chunks - 1] == pytest.approx(min(sums))
