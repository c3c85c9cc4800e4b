"""Loads in numbers, written out for four ranks and held against plain sums in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.mesh import Group, Mesh, node_of
from penstock.placement import EMPTY, ExpertPlacement, Replication
from penstock.report.loads import NUMBERS, LoadCourse
from penstock.train.history import MOST_KEPT, LoadBook
from penstock.train.measuring import (
    RowsOfReplicas,
    _joined,
    figures_of,
    load_figures,
    max_over_mean,
    rank_loads,
    relative_entropy,
)
from tests.runtime.features.expert_replicas.test_moving import small
from tests.support.cases import ROUTINGS, hosting_case
from tests.support.parity import Case, batch_of
from tests.support.ranks import Pools
from tests.support.replicas import RandomReplicas, stack_with_replicas


def figures(*given: Any, **named: Any) -> SimpleNamespace:
    return SimpleNamespace(**figures_of(*given, **named))


def test_written_out() -> None:
    """Two nodes of two ranks, an expert each: rank 0 sends all to its own expert, the others to rank 3's."""
    loads = np.zeros((4, 1, 4), dtype=np.int32)
    loads[0, 0, 0], loads[1:, 0, 3] = 8, 8
    found = figures(loads, [ExpertPlacement.even(4, 4)], Mesh(world_size=4, ep_size=4), 2)
    assert found.expert_load_max_over_mean == found.rank_load_max_over_mean == (3.0,)
    assert found.rows_crossing_nodes == (0.25,), "rank 1's"
    slots = figures(loads, [ExpertPlacement.even(4, 4)], Mesh(world_size=4, ep_size=4), 2, fixed_slots=True)
    assert (slots.rank_rows_max_over_mean, slots.rows_crossing_nodes) == ((1.0,), (0.5,)), "used or not"
    assert slots.rank_load_max_over_mean == found.rank_load_max_over_mean
    assert found.expert_load_entropy == pytest.approx(
        [-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)) / np.log(4)]
    )


def test_rows_count_where_replicas_compute_them_and_loads_are_compared_with_those_before() -> None:
    """Rank 1 hosts the expert of rank 3, which three ranks want: it computes its own rows, and none of them
    leaves its node any more."""
    loads = np.zeros((4, 1, 4), dtype=np.int32)
    loads[0, 0, 0], loads[1:, 0, 3] = 8, 8
    before, even = loads.copy(), ExpertPlacement.even(4, 4)
    before[1, 0] = (0, 8, 0, 0)
    replicas = [Replication.local(even, [[EMPTY], [3], [EMPTY], [EMPTY]])]
    mesh = Mesh(world_size=4, ep_size=4)
    hosted = RowsOfReplicas.of_group(loads, replicas, mesh, 2, 0)
    found = figures(loads, [even], mesh, 2, replica_rows=hosted, before_PYE=before)
    assert (found.rank_load_max_over_mean, found.rank_rows_max_over_mean) == ((3.0,), (2.0,))
    assert found.rows_crossing_nodes == (0.0,) and found.loads_in_common == (0.75,)
    nobody = RowsOfReplicas.of_group(loads, [Replication.none(even, 1)], mesh, 2, 0)
    alone = figures(loads, [even], mesh, 2, replica_rows=nobody)
    assert alone.rank_rows_max_over_mean == alone.rank_load_max_over_mean == (3.0,)
    assert alone.rows_crossing_nodes == (0.25,) and alone.loads_in_common is None


def test_every_expert_group_has_replicas_of_its_own() -> None:
    """Ranks 0 and 1 host all that they want; ranks 2 and 3, on another node each, send all rows to rank 2."""
    loads = np.zeros((4, 1, 2), dtype=np.int32)
    loads[:, 0, 0] = 6
    even, mesh = ExpertPlacement.even(2, 2), Mesh(world_size=4, ep_size=2)
    replicas = [Replication.local(even, [[EMPTY], [0]])], [Replication.none(even, 1)]
    shares = [
        RowsOfReplicas.of_group(loads, replicas[rank // 2], mesh, 1, rank).share(mesh, rank)
        for rank in range(4)
    ]
    assert [part.shape for share in shares for part in share] == [(1,)] * 8, "nobody tells others' rows"
    found = figures(loads, [even], mesh, 1, replica_rows=RowsOfReplicas.joined(shares))
    assert (found.rank_rows_max_over_mean, found.rows_crossing_nodes) == ((2.0,), (0.25,))
    alone = figures(loads, [even], mesh, 1)
    assert (alone.rank_rows_max_over_mean, alone.rows_crossing_nodes) == ((2.0,), (0.5,))


def test_one_node_has_no_rows_that_leave_it() -> None:
    even = np.full((2, 3, 4), 5, dtype=np.int32)
    found = figures(even, [ExpertPlacement.even(4, 2)] * 3, Mesh(world_size=2, ep_size=2), 0)
    assert found.rows_crossing_nodes is None
    assert found.expert_load_max_over_mean == found.rank_load_max_over_mean == (1.0,) * 3
    assert found.expert_load_entropy == pytest.approx([1.0] * 3)


def test_nothing_at_all_has_numbers_too() -> None:
    nothing = np.zeros((2, 1, 1), dtype=np.int64)
    assert max_over_mean(nothing.sum(axis=0)).tolist() == [0.0]
    assert relative_entropy(nothing.sum(axis=0)).tolist() == [1.0]


MESHES = [
    Mesh(world_size=8, ep_size=ep, tp_size=etp, etp_size=etp) for ep, etp in ((8, 1), (4, 1), (4, 2), (2, 2))
]


@given(st.sampled_from(MESHES), st.permutations(range(8)), st.integers(0, 2**32 - 1))
def test_every_row_counts_at_the_rank_and_the_node_that_hold_its_expert(
    mesh: Mesh, order: list[int], seed: int
) -> None:
    slots = 8 // mesh.ep_size
    placement = ExpertPlacement.of([order[r * slots : (r + 1) * slots] for r in range(mesh.ep_size)])
    loads = np.random.default_rng(seed).integers(0, 9, (8, 1, 8)).astype(np.int32)
    loads[0, 0, 0] += 1
    ranks, away = np.zeros(8), 0
    for source in range(8):
        for expert in range(8):
            place = placement.owners[expert]
            near = mesh.members(source, Group.EXPERT)[place]
            away += loads[source, 0, expert] * (node_of(near, 4) != node_of(source, 4))
            for rank in mesh.members(source, Group.EXPERT_SHARDS):
                ranks[rank] += loads[source, 0, expert] * (mesh.place(rank, Group.EXPERT) == place)
    assert (rank_loads(loads.astype(np.int64), [placement], mesh)[:, 0] == ranks).all()
    found = figures(loads, [placement], mesh, 4)
    assert found.rows_crossing_nodes == pytest.approx([away / loads.sum()])
    replicas = [
        Replication.local(placement, [[EMPTY], *[[EMPTY]] * (mesh.ep_size - 2), [placement.held(0)[0]]])
    ]
    hosted = RowsOfReplicas.joined(
        [RowsOfReplicas.of_group(loads, replicas, mesh, 4, rank).share(mesh, rank) for rank in range(8)]
    )
    found = figures(loads, [placement], mesh, 4, replica_rows=hosted)
    assert found.rows_crossing_nodes is not None and found.rows_crossing_nodes[0] <= away / loads.sum()
    assert hosted.rows_PY.sum() == ranks.sum()


# ---- found by all ranks together ---------------------------------------------------------------------------


def measured(rank: int, case: Case) -> tuple[Any, ...]:
    """Of the second step: its loads, what this rank's group hosted, and two metrics."""
    stack = stack_with_replicas(rank, case, RandomReplicas(moving=small(2, "least_loaded")))
    tokens, labels = batch_of(case)
    mine = case.mine(rank)
    for _ in range(2):
        stack(tokens[mine], labels[mine]).backward()
    found = load_figures(stack)
    figures = found["rank_rows_max_over_mean"], found["rows_crossing_nodes"]
    return stack.loads[-1], stack.loads.replications, figures


def test_replicas_of_all_expert_groups_count(ranks: Pools) -> None:
    """Two groups of two ranks; the second has more rows, and other replicas."""
    case = replace(hosting_case(4, ROUTINGS[0], "flowmoe"), ep_size=2, node_size=1, batches=(2, 1, 4, 5))
    found, mesh = ranks(4).run(measured, case), Mesh(world_size=4, ep_size=2)
    loads, replications, figures = found[0]
    assert all(each[2] == figures for each in found)
    assert replications != found[2][1]
    groups = [RowsOfReplicas.of_group(loads, found[first][1], mesh, 1, first) for first in (0, 2)]
    assert all((group.rows_PY.sum(axis=1) > 0).sum() == 2 for group in groups), "each knows its own"
    together = RowsOfReplicas.joined([groups[rank // 2].share(mesh, rank) for rank in range(4)])
    assert together.rows_PY.sum() == loads.sum()
    crossing = together.away_Y / loads.sum(axis=(0, 2))
    assert figures == (tuple(max_over_mean(together.rows_PY.T)), tuple(crossing))


# ---- routing of every sample -------------------------------------------------------------------------------


ONE, TWO = np.array([[1, 0]]), np.array([[0, 2]])


def test_samples_that_move_between_layers_keep_their_numbers() -> None:
    """Two ranks with a sample each, which they exchange between two layers."""
    first = [(np.array([7]), ONE), (np.array([3]), TWO)]
    second = [(np.array([3]), TWO), (np.array([7]), ONE)]
    assert _joined([first, second]).tolist() == [[[1, 0], [1, 0]], [[0, 2], [0, 2]]]


def test_parts_of_a_sample_on_several_ranks_are_added() -> None:
    shared = [[(np.array([7]), ONE)], [(np.array([7]), TWO)]]
    assert _joined(shared).tolist() == [[[1, 2]]]


def test_a_run_goes_on_with_its_own_loads_alone(tmp_path: Path) -> None:
    """With those of another model the next checkpoint would fail."""
    LoadCourse((0, 2), (1, 2, 3), np.ones((3, 2, 4), dtype=np.int64)).save(tmp_path)
    course = LoadBook.resumed(tmp_path, 2, (0, 2), 4).course((0, 2))
    assert course is not None and course.steps == (1, 2)
    for layers, experts in (((0, 1), 4), ((0,), 4), ((0, 2), 8)):
        with pytest.raises(ConfigError) as caught:
            LoadBook.resumed(tmp_path, 2, layers, experts)
        assert caught.value.key == str(tmp_path / NUMBERS)


def test_a_run_that_goes_on_keeps_as_few_steps_as_one_that_never_stopped(tmp_path: Path) -> None:
    """A figure puts what is kept at equal distances."""
    loads, stop, end = np.ones((1, 2), dtype=np.int64), MOST_KEPT + 4, MOST_KEPT + 130
    books = LoadBook(), LoadBook()
    for book, last in zip(books, (stop, end), strict=True):
        for step in range(1, last + 1):
            book.add(step, loads)
    course, whole = (book.course((0,)) for book in books)
    assert course is not None and whole is not None
    course.save(tmp_path)
    resumed = LoadBook.resumed(tmp_path, stop, (0,), 2)
    for step in range(stop + 1, end + 1):
        resumed.add(step, loads)
    course = resumed.course((0,))
    assert course is not None and course.steps == whole.steps
