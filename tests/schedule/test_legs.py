"""The picture of schedules whose dispatch has legs inside nodes, and of shared experts."""

from __future__ import annotations

from textwrap import dedent

import pytest

from penstock.features.dispatch import DISPATCHES
from penstock.step import StepShape
from tests.steps import planned

PICTURES = {
    "hierarchical_2d": """\
        flowmoe: one column = one slot, · = idle
        forward
        layer    L0
        compute  EM0 EM1 AT0 AT1 S0  S1  X0 X1 ·   U0  U1 HD0 HD1 ·
        intra    ·   ·   ·   ·   DG0 DG1 ·  ·  CS0 CS1 ·  ·   ·   ·
        inter    ·   ·   ·   N0  N1  D0  D1 C0 C1  ·   ·  ·   ·   ST
        backward
        layer    L0
        compute  HD1 HD0 U1 U0  S1  S0 X1 X0 ·   AT1 AT0 EM1 EM0 ·
        intra    ·   ·   ·  CS1 CS0 ·  ·  ·  DG1 DG0 ·   ·   ·   ·
        inter    ·   ·   ·  ·   C1  C0 ·  D1 D0  ·   ·   ·   ·   AR0.0
        """,
    "hierarchical_1d": """\
        flowmoe: one column = one slot, · = idle
        forward
        layer    L0
        compute  EM0 EM1 AT0 AT1 S0  S1  ·   X0  X1  ·   ·   U0  U1 HD0 HD1 ·
        intra    ·   ·   ·   ·   DG0 DG1 DS0 DS1 CG0 CG1 CS0 CS1 ·  ·   ·   ·
        inter    ·   ·   ·   N0  N1  D0  D1  ·   ·   C0  C1  ·   ·  ·   ·   ST
        backward
        layer    L0
        compute  HD1 HD0 U1 U0  S1  S0  X1  X0  ·   ·   AT1 AT0 EM1 EM0 ·
        intra    ·   ·   ·  CS1 CS0 CG1 CG0 DS1 DS0 DG1 DG0 ·   ·   ·   ·
        inter    ·   ·   ·  ·   C1  C0  ·   ·   D1  D0  ·   ·   ·   ·   AR0.0
        """,
    "node_once": """\
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
        """,
}


@pytest.mark.parametrize("name", PICTURES)
def test_intra_and_inter_legs_run_at_the_same_time_and_shared_experts_under_them(name: str) -> None:
    shape = StepShape(moe_layers=(True,), dispatch=DISPATCHES[name].hops, shared_experts=True)
    plan = planned("flowmoe", shape)
    assert plan.schedule.grid(plan.graph, width=106) == dedent(PICTURES[name])
