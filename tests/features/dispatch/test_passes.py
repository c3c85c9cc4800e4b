"""Legs inside the node around the one between nodes, out and home, forward and backward."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.features.dispatch import DISPATCHES
from penstock.features.dispatch.feature import Hierarchical
from penstock.graph import Graph, Lane
from penstock.mesh import Group
from penstock.step.passes import Transpose
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import check_picture
from tests.step.support import names, reads
from tests.steps import task_at

PLAIN = PlainStep(moe_layers=(True, True)).graph()
CHAINS = {
    "flat": "D X C",
    "hierarchical_1d": "DG D DS X CG C CS",
    "hierarchical_2d": "DG D X C CS",
    "node_once": "D DS X CG C",
}


def rewritten(name: str) -> Graph:
    return Hierarchical(DISPATCHES[name].hops)(PLAIN).check()


def test_the_picture_is_true() -> None:
    check_picture(Hierarchical, PLAIN, rewritten("hierarchical_1d"), layer=1)


@pytest.mark.parametrize("name", CHAINS)
def test_rows_go_from_leg_to_leg_and_gradients_the_same_way_back(name: str) -> None:
    chain = CHAINS[name].split()
    graph = Transpose()(rewritten(name)).check()
    for layer in (0, 1):
        for first, second in pairwise(chain):
            there, back = f"L{layer}.{first}.m0.c0", f"L{layer}.{second}.m0.c0"
            assert reads(graph, f"{back}.F")["rows"] == f"{there}.F"
            assert reads(graph, f"{there}.B")["d_rows"] == f"{back}.B"
        assert reads(graph, f"L{layer}.{chain[0]}.m0.c0.F")["rows"] == f"L{layer}.AT.m0.F"
        assert reads(graph, f"L{layer}.U.m0.F")["rows"] == f"L{layer}.{chain[-1]}.m0.c0.F"
        assert reads(graph, f"L{layer}.AT.m0.B")["d_rows"] == f"L{layer}.{chain[0]}.m0.c0.B"


@pytest.mark.parametrize("name", CHAINS)
def test_every_leg_knows_the_route_and_its_group(name: str) -> None:
    graph = rewritten(name)
    for hop in DISPATCHES[name].hops:
        for op in (hop.op, hop.home.op):
            leg = task_at(graph, f"L0.{op}.m0.c0.F")
            assert (leg.lane, leg.axes) == (hop.lane, hop.axes)
            assert reads(graph, str(leg))["route"] == "L0.N.m0.F"


def test_which_legs_between_nodes_follow_rails() -> None:
    axes = {name: task_at(rewritten(name), "L1.C.m0.c0.F").axes for name in CHAINS}
    wide = ("flat", "hierarchical_1d")
    assert axes == {name: Group.EXPERT if name in wide else Group.RAIL for name in CHAINS}


def test_a_flat_dispatch_changes_nothing() -> None:
    assert rewritten("flat") == PLAIN


def test_only_legs_are_added() -> None:
    graph = rewritten("hierarchical_1d")
    legs = [name for name in names(graph) if task_at(graph, name).lane is Lane.INTRA]
    assert [name for name in names(graph) if name not in legs] == names(PLAIN)
    assert len(legs) == 2 * 4
