"""FSMoE on one lane: the same tasks in an order that one lane can run, and text that says what two gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lanes import OneLaneFSMoE, gain, measure
from benchmarks.restore import restore
from penstock.bench import BenchConfig
from penstock.config import ConfigError
from penstock.decision import Decision, GradientBytes
from penstock.graph import Lane
from penstock.ops import Op
from penstock.schedule import SCHEDULES
from penstock.schedule.schedule import Schedule, unit_cost
from penstock.step import StepShape, build_graph
from penstock.topology import Layout
from tests.benchmarks.results import case, result
from tests.steps import SHARED

ONE = OneLaneFSMoE()


def planned(layers: int, chunks: int, backward: int) -> tuple[Schedule, StepShape]:
    """Its order with one slot per task, and how the step is cut."""
    plain = StepShape(moe_layers=(True,) * layers, sharing=SHARED)
    sizes = GradientBytes(replicated=(8,) * layers, experts=(0,) * layers, partial=(4,) * layers)
    choice = Decision(schedule="fsmoe", chunks=chunks, backward_chunks=backward)
    shape = ONE.shape(plain, choice, sizes)
    graph = build_graph(shape)
    order = ONE.order(graph, unit_cost, choice)
    order.check(graph)
    return order, shape


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_the_step_of_fsmoe_runs_on_one_lane(layers: int, chunks: int, backward: int) -> None:
    """Task by task, but for lanes; reductions stand before the same transfers between nodes."""
    one, shape = planned(layers, chunks, backward)
    graph = build_graph(replace(shape, more=()))
    two = SCHEDULES["fsmoe"].order(graph, unit_cost, Decision(schedule="fsmoe"))
    assert Lane.INTRA in two.lanes and Lane.INTRA not in one.lanes
    assert [task.name for task in one.lanes[Lane.COMPUTE]] == [task.name for task in two.lanes[Lane.COMPUTE]]
    between = {task.name for task in two.lanes[Lane.INTER]}
    kept = [task.name for task in one.lanes[Lane.INTER] if task.name in between]
    assert kept == [task.name for task in two.lanes[Lane.INTER]]


def test_chunks_go_on_as_soon_as_they_can() -> None:
    """A chunk is gathered before the next one leaves: experts wait for no more than their own."""
    one, _ = planned(1, 2, 2)
    forward = [task for task in one.lanes[Lane.INTER] if task.forward]
    routed = [str(task.name) for task in forward if task.op in (Op.DISPATCH, Op.SHARD_GATHER)]
    assert routed == ["L0.D.m0.c0.F", "L0.XG.m0.c0.F", "L0.D.m0.c1.F", "L0.XG.m0.c1.F"]


def test_the_gain_is_told_as_measured_and_as_simulated() -> None:
    cases = case("fsmoe_one_lane", 1.1, base_s=1.1), case("fsmoe", 1.0, base_s=1.1)
    assert (
        gain(restore(result(cases=cases)))
        == "two lanes over one: measured 1.100 [0.950, 1.050], simulated 1.100"
    )


def test_ranks_that_share_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="sends nothing inside nodes"):
        measure(BenchConfig(), Layout(world_size=2, ep_size=2, rank=0), None)
