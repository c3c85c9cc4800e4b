"""The picture of a schedule: the marked cell, and how it wraps."""

from __future__ import annotations

from textwrap import dedent

from hypothesis import given
from hypothesis import strategies as st

from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Lane, Phase
from penstock.schedule import Schedule
from penstock.step import StepShape
from tests.steps import example_plan, of_phase, planned, random_orders, seeds, shapes, task_at


def test_a_marked_task_stands_in_brackets_and_nothing_else_changes() -> None:
    plan = example_plan("sequential", exchange_counts=False)
    lines = plan.schedule.grid(plan.graph, mark=task_at(plan.graph, "L1.X.m0.c0.B")).splitlines()
    assert lines[:6] == plan.schedule.grid(plan.graph).splitlines()[:6]
    assert lines[6:] == [
        "layer    L1                    L0",
        "compute  HD0 U0 ·  >X0< ·  AT0 U0 ·  X0 ·  AT0 EM0 ·     ·",
        "inter    ·   ·  C0 ·    D0 ·   ·  C0 ·  D0 ·   ·   AR0.0 AR1.0",
    ]


def test_a_picture_wraps_between_slots() -> None:
    plan = example_plan("sequential", exchange_counts=False)
    assert plan.schedule.grid(plan.graph, width=36).split("backward")[0].splitlines() == [
        "sequential: one column = one slot, · = idle",
        "forward",
        "layer    L0                  L1",
        "compute  EM0 AT0 ·  X0 ·  U0 AT0 ·",
        "inter    ·   ·   D0 ·  C0 ·  ·   D0",
        "",
        "layer",
        "compute  X0 ·  U0 HD0 ·",
        "inter    ·  C0 ·  ·   ST",
    ]


@given(shapes(), seeds, st.integers(30, 110))
def test_no_row_is_wider_than_asked_for_and_no_cell_is_lost(shape: StepShape, seed: int, width: int) -> None:
    graph = build_graph(shape)
    schedule = Schedule("s", random_orders(graph, seed))
    title, *lines = schedule.grid(graph, width=width).splitlines()
    assert title.startswith("s: ")
    assert max(map(len, lines)) <= width
    backward = lines.index("backward")
    for phase, rows in ((Phase.FORWARD, lines[1:backward]), (Phase.BACKWARD, lines[backward + 1 :])):
        for lane in schedule.lanes:
            cells = [cell for row in rows if row.startswith(lane) for cell in row.split()[1:] if cell != "·"]
            assert cells == [task.cell for task in of_phase(schedule.lanes[lane], phase)]


def test_a_lane_without_tasks_has_no_row() -> None:
    plan = example_plan("flowmoe")
    padded = Schedule(plan.schedule.name, {**plan.schedule.lanes, Lane.INTRA: ()})
    assert padded.grid(plan.graph) == plan.schedule.grid(plan.graph)


# ---- legs inside nodes -------------------------------------------------------------------------------------


PICTURE = """\
    flowmoe: one column = one slot, · = idle
    forward
    layer    L0
    compute  EM0 EM1 AT0 AT1 S0 S1  X0 ·   X1  ·   U0 U1 HD0 HD1 ·
    intra    ·   ·   ·   ·   ·  DS0 ·  DS1 CG0 CG1 ·  ·  ·   ·   ·
    inter    ·   ·   ·   N0  D0 N1  D1 ·   ·   C0  C1 ·  ·   ·   ST
    backward
    layer    L0
    compute  HD1 HD0 U1 U0 S1  S0  X1 X0  ·   AT1 AT0 EM1 EM0 ·
    intra    ·   ·   ·  ·  CG1 CG0 ·  DS1 DS0 ·   ·   ·   ·   ·
    inter    ·   ·   ·  C1 C0  ·   ·  ·   D1  D0  ·   ·   ·   AR0.0
    """


def test_intra_and_inter_legs_run_at_the_same_time_and_shared_experts_under_them() -> None:
    shape = StepShape(moe_layers=(True,), dispatch=DISPATCHES["node_once"].hops, shared_experts=True)
    plan = planned("flowmoe", shape)
    assert plan.schedule.grid(plan.graph, width=106) == dedent(PICTURE)
