"""Named axes of ranks: every answer against the rule that a group keeps all coordinates but its own."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mesh import JOINED, VIEWS, Axes, Group, Mesh, MeshError, resolve
from tests.steps import seeds

SIZES = st.integers(1, 3)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Any world whose views fill it."""
    local, nodes, etp, edp = draw(st.tuples(SIZES, SIZES, SIZES, SIZES))
    world_size = local * nodes * etp * edp
    dividing = [n for n in range(1, world_size + 1) if world_size % n == 0]
    return Mesh(
        world_size=world_size,
        ep_size=local * nodes,
        ep_local_size=local if nodes > 1 else draw(st.sampled_from([0, local])),
        tp_size=draw(st.sampled_from(dividing)),
        etp_size=etp,
    )


def any_axes() -> st.SearchStrategy[Axes]:
    """Axes of one view in any order, joined ones among them."""
    dense = st.lists(st.sampled_from(VIEWS["dense"]), unique=True)
    experts = st.lists(st.sampled_from(VIEWS["experts"]), unique=True)
    joined = st.lists(st.sampled_from(["ep", "edp", "etp"]), unique=True)
    return (dense | experts | joined).map(tuple)


def coordinates(mesh: Mesh, view: str) -> list[dict[str, int]]:
    """Of every rank, by counting: the last axis of a view changes fastest."""
    ranges = [range(mesh.sizes[axis]) for axis in VIEWS[view]]
    return [dict(zip(VIEWS[view], each, strict=True)) for each in product(*ranges)]


def view_of(axes: Axes) -> tuple[str, set[str]]:
    """The view of some axes, and its own axes among them."""
    single = {each for axis in axes for each in JOINED.get(axis, (axis,))}
    return ("dense" if single <= set(VIEWS["dense"]) else "experts"), single


def same_group(mesh: Mesh, axes: Axes) -> list[list[int]]:
    """For every rank the ranks that differ from it in nothing but coordinates along `axes`."""
    view, single = view_of(axes)
    where = coordinates(mesh, view)
    return [
        [o for o, there in enumerate(where) if all(here[a] == there[a] for a in here if a not in single)]
        for here in where
    ]


@given(meshes(), any_axes())
def test_a_group_is_what_remains_when_other_coordinates_are_fixed(mesh: Mesh, axes: Axes) -> None:
    expected = same_group(mesh, axes)
    for rank in range(mesh.world_size):
        members = mesh.members(rank, axes)
        assert list(members) == expected[rank], "places are in the order of ranks"
        assert members[mesh.place(rank, axes)] == rank
        assert mesh.groups(axes)[mesh.group(rank, axes)] == members
        assert len(members) == mesh.size(axes)


@given(meshes())
def test_coordinates_are_counted_with_the_last_axis_fastest(mesh: Mesh) -> None:
    for view in VIEWS:
        for rank, where in enumerate(coordinates(mesh, view)):
            assert {axis: mesh.place(rank, (axis,)) for axis in VIEWS[view]} == where
    for rank, where in enumerate(coordinates(mesh, "experts")):
        assert mesh.place(rank, ("ep",)) == where["ep_node"] * mesh.local_size + where["ep_local"]


@given(meshes(), any_axes(), seeds)
def test_a_group_has_the_latest_time_of_its_members(mesh: Mesh, axes: Axes, seed: int) -> None:
    times = np.random.default_rng(seed).random(mesh.world_size)
    found = mesh.latest(times, axes)
    assert found.tolist() == [max(times[list(group)]) for group in same_group(mesh, axes)]


@given(meshes())
def test_silent_are_the_groups_of_one_rank(mesh: Mesh) -> None:
    alone = {axes for axes in Group.NAMES.values() if all(len(g) == 1 for g in same_group(mesh, axes))}
    assert mesh.silent == alone


def test_two_nodes_of_two_ranks_twice() -> None:
    mesh = Mesh(world_size=8, ep_size=4, ep_local_size=2)
    assert mesh.groups(Group.EXPERT) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups(Group.NODE) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(Group.RAIL) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups(Group.EXPERT_DATA) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups(Group.WORLD) == (tuple(range(8)),)
    assert mesh.groups(Group.ALONE) == tuple((rank,) for rank in range(8))
    assert mesh.members(6, Group.RAIL) == (4, 6)


def test_names_for_people() -> None:
    assert {name: Group.name(axes) for name, axes in Group.NAMES.items()} == {n: n for n in Group.NAMES}
    assert Group.name(("tp",)) == "tp"
    assert Group.name(("edp", "etp")) == "edp x etp"


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [("dp", "ep"), ("tp", "ep_local"), ("etp", "dp")])
def test_axes_of_two_views_are_refused_by_name(axes: Axes) -> None:
    why = f"axes {', '.join(axes)} belong to different views of the world (dense: dp x tp; experts: edp x"
    with pytest.raises(MeshError, match=re.escape(why)):
        resolve(axes)
    with pytest.raises(MeshError, match=re.escape(why)):
        Mesh(world_size=4, ep_size=2).size(axes)


def test_an_unknown_axis_is_answered_with_those_there_are() -> None:
    with pytest.raises(MeshError, match=r"^no axis is called 'cp'; there are dp, tp, edp, .*, ep$"):
        resolve(("ep", "cp"))


@pytest.mark.parametrize("axes", [("ep", "ep"), ("ep", "ep_node"), ("dp", "dp")])
def test_an_axis_that_stands_twice_is_refused(axes: Axes) -> None:
    with pytest.raises(MeshError, match="an axis stands twice"):
        resolve(axes)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"tp_size": 4}, "tp = 4 does not divide a world of 6 ranks"),
        ({"tp_size": 0}, "tp = 0 does not divide a world of 6 ranks"),
        ({"ep_size": 4}, "ep x etp = 4 does not divide a world of 6 ranks"),
        ({"ep_size": 3, "etp_size": 4}, "ep x etp = 12 does not divide a world of 6 ranks"),
        ({"ep_size": 0}, "ep x etp = 0 does not divide a world of 6 ranks"),
        ({"ep_size": 6, "ep_local_size": 4}, "ep_local = 4 does not divide ep = 6"),
    ],
)
def test_sizes_that_do_not_fill_the_world_are_refused(sizes: dict[str, Any], why: str) -> None:
    with pytest.raises(MeshError, match=f"^{re.escape(why)}$"):
        Mesh(world_size=6, **sizes)
