"""Where groups are: counted rank by rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import Span
from penstock.cost.span import span_of
from penstock.mesh import Axes, Group
from penstock.step import StepShape
from penstock.topology import Layout
from tests.cost.test_step import workload

KINDS = [Group.EXPERT, Group.EXPERT_DATA, Group.WORLD]


@given(
    st.sampled_from(KINDS), st.sampled_from([1, 2, 3, 4]), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6])
)
def test_spans_are_those_of_the_layout(kind: Axes, ep_size: int, edp: int, node_size: int) -> None:
    """Also of groups that do not fill whole nodes."""
    world = ep_size * edp
    mesh = Layout(world_size=world, ep_size=ep_size, rank=0, node_size=node_size).mesh
    groups = mesh.groups(kind)
    span = span_of(mesh, kind, node_size)
    on = [[rank // node_size for rank in ranks] for ranks in groups]
    size = len(groups[0])
    assert span == Span.of(on) and span.ranks == size
    leaving = max(
        sum(here != there for nodes in on for here in nodes if here == node for there in nodes) / size
        for node in range(world)
    )
    assert span.leaving == pytest.approx(leaving)
    assert span.nodes == max(len(set(nodes)) for nodes in on)
    assert span.crossing == max(
        sum(node in nodes and len(set(nodes)) > 1 for nodes in on) for node in range(world)
    )


def test_a_regular_group_written_out() -> None:
    """2 nodes of 3, twice: 3 members send 3/6 of a buffer each abroad, in two groups."""
    found = Span.regular(2, 3, at_once=2)
    assert found == Span(ranks=6, nodes=2, most=3, fewest=3, leaving=3.0, crossing=2)
    assert Span.apart(4) == Span(ranks=4, nodes=4, most=1, fewest=1, leaving=0.75, crossing=1)


def test_what_a_workload_says_of_its_groups() -> None:
    work = workload(StepShape(moe_layers=(True,)))  # 4 ranks, expert groups of 2 over 2 nodes
    assert work.span(Group.EXPERT) == Span.regular(2, 1)
    inside = replace(work, node_size=0)
    assert inside.span(Group.WORLD) == Span.apart(4), "nobody knows nodes"
    inside = replace(inside, devices_per_node=2)
    assert inside.span(Group.EXPERT) == Span.of([[0, 0], [1, 1]])
    assert inside.span(Group.EXPERT_DATA) == Span.regular(2, 1, at_once=2), "both share the card"
    assert inside.span(Group.WORLD) == Span.regular(2, 2)


def test_shards_of_a_node_share_its_card() -> None:
    """Groups of 4 shards that fill a node each: every one of 4 devices has its like in the others."""
    whole = workload(StepShape(moe_layers=(True,)), ep_size=4)
    told = replace(whole, world_size=16, tp_size=4, etp_size=4, node_size=1)
    work = replace(told, devices_per_node=4)
    assert work.span(Group.EXPERT) == work.span(Group.DATA) == Span.regular(4, 1, at_once=4)
    assert work.span(Group.EXPERT_SHARDS) == work.span(Group.WORLD) == Span.regular(4, 4)
    inside = Span.of([[node] * 4 for node in range(4)])
    assert work.span(Group.SHARDS) == work.span(Group.TENSOR) == inside
    assert told.span(Group.EXPERT) == work.span(Group.EXPERT), "places in nodes say how large nodes are"
