"""Layouts: what is refused and which is nearest; groups partition the world."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.mesh import Axes, Group
from penstock.topology import Control, Layout, ParallelConfig, find_node_size, lane_groups
from tests.support.ranks import Pools


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Also with nodes that an expert group does not fill, or that are larger than one."""
    ep_size, edp_size = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    world_size = ep_size * edp_size
    rank, node_size = draw(st.integers(0, world_size - 1)), draw(st.integers(0, world_size))
    return Layout(world_size=world_size, ep_size=ep_size, rank=rank, node_size=node_size)


@given(st.integers(1, 40), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_a_layout_divides_or_the_nearest_one_is_named(
    world_size: int, num_experts: int, ep_size: int | None
) -> None:
    config = ParallelConfig(ep_size=ep_size)
    wanted = world_size if ep_size is None else ep_size
    if world_size % wanted == 0 and num_experts % wanted == 0:
        layout = Layout.build(config, world_size, world_size - 1, num_experts)
        assert (layout.ep_size, layout.world_size, layout.rank) == (wanted, world_size, world_size - 1)
        return
    with pytest.raises(ConfigError) as caught:
        Layout.build(config, world_size, 0, num_experts)
    if ep_size is None:
        assert caught.value.key == "moe.num_experts"
        experts, other = (int(n) for n in re.findall(r"\d+", caught.value.hint))
        assert Layout.build(config, world_size, 0, experts).ep_size == world_size
        assert Layout.build(ParallelConfig(ep_size=other), world_size, 0, num_experts).ep_size == other
        return
    assert caught.value.key == "parallel.ep_size"
    nearest = int(caught.value.hint.removeprefix("Nearest valid: ").removesuffix("."))
    assert Layout.build(ParallelConfig(ep_size=nearest), world_size, 0, num_experts).ep_size == nearest
    nearer = range(max(1, wanted - abs(wanted - nearest) + 1), wanted + abs(wanted - nearest))
    assert not any(world_size % n == 0 and num_experts % n == 0 for n in nearer)


@given(layouts())
def test_every_kind_of_group_partitions_the_world(layout: Layout) -> None:
    for group in (Group.ALONE, *Group.NAMES.values()):
        members = layout.mesh.groups(group)
        assert sorted(rank for ranks in members for rank in ranks) == list(range(layout.world_size))
        sizes = {
            Group.WORLD: layout.world_size,
            Group.EXPERT: layout.ep_size,
            Group.EXPERT_DATA: layout.edp_size,
            Group.NODE: layout.ep_node_size,
            Group.RAIL: layout.ep_nodes,
            Group.TENSOR: layout.tp_size,
            Group.DATA: layout.dp_size,
            Group.SHARDS: layout.etp_size,
            Group.EXPERT_SHARDS: layout.ep_size * layout.etp_size,
            Group.ALONE: 1,
        }
        assert {len(ranks) for ranks in members} == {sizes[group]}


@given(layouts())
def test_groups_hold_what_their_names_say(layout: Layout) -> None:
    """An expert group is consecutive and in the order of ep_rank; replicas share their ep_rank."""
    ep_ranks = [
        Layout(world_size=layout.world_size, ep_size=layout.ep_size, rank=rank).ep_rank
        for rank in range(layout.world_size)
    ]
    for ranks in layout.mesh.groups(Group.EXPERT):
        assert ranks == tuple(range(ranks[0], ranks[0] + layout.ep_size))
        assert [ep_ranks[rank] for rank in ranks] == list(range(layout.ep_size))
    for ranks in layout.mesh.groups(Group.EXPERT_DATA):
        assert len({ep_ranks[rank] for rank in ranks}) == 1
    assert layout.edp_size * layout.ep_size == layout.world_size


@given(layouts())
def test_nodes_and_rails_are_rows_and_columns_of_an_expert_group(layout: Layout) -> None:
    """Every node meets every rail of its expert group in exactly one rank."""
    nodes, rails = layout.mesh.groups(Group.NODE), layout.mesh.groups(Group.RAIL)
    for ranks in layout.mesh.groups(Group.EXPERT):
        mine = [node for node in nodes if set(node) <= set(ranks)]
        assert tuple(rank for node in mine for rank in node) == ranks
        for rail in [rail for rail in rails if rail[0] in ranks]:
            assert [len(set(rail) & set(node)) for node in mine] == [1] * layout.ep_nodes
    if 0 < layout.node_size < layout.ep_size and layout.ep_size % layout.node_size == 0:
        assert layout.ep_node_size == layout.node_size
    else:
        assert layout.ep_nodes == 1


def test_a_hierarchical_dispatch_needs_nodes() -> None:
    spans = Layout(world_size=4, ep_size=4, rank=0, node_size=2)
    spans.require_nodes("moe.dispatch", "hierarchical_2d")
    for ep_size, node_size, why in (
        (4, 0, "run in one node"),
        (2, 2, "run in one node"),
        (4, 3, "nodes of 3"),
    ):
        layout = Layout(world_size=4, ep_size=ep_size, rank=0, node_size=node_size)
        with pytest.raises(ConfigError, match=rf"moe.dispatch = .*{why}.*Use flat"):
            layout.require_nodes("moe.dispatch", "hierarchical_2d")


def test_ranks_per_node_must_divide_the_world() -> None:
    assert Layout.build(ParallelConfig(ranks_per_node=2), 4, 0, 4).node_size == 2
    assert Layout.build(ParallelConfig(), 4, 0, 4, node_size=2).node_size == 2
    with pytest.raises(ConfigError, match=r"ranks_per_node = 3: must divide .* Nearest valid: 2"):
        Layout.build(ParallelConfig(ranks_per_node=3), 4, 0, 4)


def real_groups(rank: int, world_size: int, ep_size: int) -> dict[Axes, list[int]]:
    import torch.distributed as dist

    layout = Layout(world_size=world_size, ep_size=ep_size, rank=rank)
    return {kind: dist.get_process_group_ranks(g) for kind, g in lane_groups(layout, 60.0).items()}


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_process_groups_follow_the_layout(ranks: Pools, ep_size: int) -> None:
    for rank, groups in enumerate(ranks(4).run(real_groups, 4, ep_size)):
        layout = Layout(world_size=4, ep_size=ep_size, rank=rank)
        assert set(groups) == {Group.WORLD, Group.EXPERT, Group.EXPERT_DATA}
        for kind, members in groups.items():
            assert tuple(members) in layout.mesh.groups(kind)
            assert rank in members


@pytest.mark.parametrize("name", ["tp_size", "etp_size"])
def test_what_is_exchanged_inside_nodes_needs_to_know_them(name: str) -> None:
    sizes: dict[str, Any] = {name: 2}
    with pytest.raises(ConfigError, match=rf"parallel.{name} = 2: .* Say parallel.ranks_per_node=2"):
        Layout.build(ParallelConfig(**sizes), 6, 0, 6, node_size=0)
    assert Layout.build(ParallelConfig(**sizes, ranks_per_node=2), 6, 0, 6, node_size=0).node_size == 2
    assert Layout.build(ParallelConfig(**sizes), 6, 0, 6).node_size == 0, "nobody has looked"
    assert Layout.build(ParallelConfig(), 6, 0, 6, node_size=0).node_size == 0


# ---- which ranks share a node ------------------------------------------------------------------------------


class Told(Control):
    """A control whose ranks say what their local ranks are."""

    def __init__(self, places: list[int]) -> None:
        super().__init__(0, 1)
        self.places = places

    def gather(self, mine: Any, purpose: str) -> list[Any]:
        del mine, purpose
        return list(self.places)


@pytest.mark.parametrize(
    ("places", "size"),
    [
        ([0], 1),
        ([0, 1, 2, 3], 4),
        ([0, 1, 0, 1], 2),
        ([0, 0, 0], 1),
        ([0, 1, 0], 0),
        ([0, 1, 0, 1, 2], 0),
        ([0, 0, 1, 1], 0),
        ([1, 0, 1, 0], 0),
    ],
)
def test_equal_runs_of_consecutive_ranks(places: list[int], size: int) -> None:
    assert find_node_size(Told(places), 0) == size


def node_size_here(rank: int, world_size: int, devices: int) -> int:
    return find_node_size(Control(rank, world_size), rank % devices)


@pytest.mark.parametrize("devices", [1, 2])
def test_real_ranks_agree(ranks: Pools, devices: int) -> None:
    assert ranks(2).run(node_size_here, 2, devices) == [devices, devices]
