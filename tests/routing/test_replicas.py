"""Rows split by their own loads: none is lost, ranks compute alike, rows stay near, ranks find the same."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from benchmarks.skewed import drifting_loads, expert_problem
from penstock.apportion import Counts
from penstock.cost import RoutedCost, Workload
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES, Place
from penstock.features.expert_replicas.planners import PLANNERS
from penstock.features.expert_replicas.problem import LayerLoad
from penstock.mesh import Mesh
from penstock.ops import Op
from penstock.placement import EMPTY, SPLIT, ExpertPlacement, PlacementError, Replication
from penstock.routing.joined import num_sets
from penstock.routing.replicas import ExactSplit, filled
from penstock.routing.routes import RouteMaker, ShardPlace
from penstock.routing.sizes import Ints
from penstock.step import StepShape
from penstock.step.shape import ExpertForm
from tests.features.problems import expert_problems
from tests.support.draws import draws
from tests.workloads.strategies import CLUSTER

PAIRS = ExpertPlacement.even(4, 4)


@st.composite
def splits(draw: st.DrawFn) -> tuple[ExactSplit, Ints]:
    """Replicas anywhere, any limit, and the rows of up to 3 slices; some experts on 1 or 2 ranks each."""
    problem = draw(expert_problems())
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    placement, replicas = problem.placement, []
    for rank in range(problem.ranks):
        others = [e for e in range(placement.num_experts) if e not in placement.held(rank)]
        chosen = [*rng.permutation(others).tolist(), *[EMPTY] * problem.replica_slots][
            : problem.replica_slots
        ]
        replicas.append([EMPTY if rng.random() < 0.3 else expert for expert in chosen])
    limit = draw(st.sampled_from((SPLIT, SPLIT + 200, 2 * SPLIT)))
    replication = replace(Replication.local(placement, replicas), limit=limit)
    slices, shards = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    parts = np.repeat(problem.loads, shards, axis=0)[:, None].repeat(slices, axis=1)
    return ExactSplit.of(replication, problem.costs.links.nodes), rng.binomial(parts, 0.5)


def computed(split: ExactSplit, counts_SCE: Ints) -> Ints:
    """Rows by rank and slice, [P, C]."""
    rows: Ints = split.table(counts_SCE).sum(axis=(0, 3))
    return rows


def least_possible(split: ExactSplit, rows_E: Ints) -> int:
    """The largest load of a rank that no split can do without, by maximum flow."""
    ranks, experts = len(split.nodes), len(rows_E)
    edges = {(q // split.slots, e) for q, e in enumerate(split.by_position) if e != EMPTY}
    low, high = 0, int(rows_E.sum())
    while low < high:
        middle = (low + high) // 2
        capacity = np.zeros((experts + ranks + 2,) * 2, np.int32)
        capacity[-2, :experts] = rows_E
        capacity[experts:-2, -1] = middle
        for rank, expert in edges:
            capacity[expert, experts + rank] = rows_E[expert]
        flow = maximum_flow(csr_array(capacity), experts + ranks, experts + ranks + 1).flow_value
        low, high = (low, middle) if flow == rows_E.sum() else (middle + 1, high)
    return low


@given(splits())
def test_every_row_goes_to_a_home_of_its_expert(drawn: tuple[ExactSplit, Ints]) -> None:
    split, counts_SCE = drawn
    table_SPCN = split.table(counts_SCE)
    assert table_SPCN.min(initial=0) >= 0
    by_position = table_SPCN.transpose(0, 2, 1, 3).reshape(*counts_SCE.shape[:2], -1)
    held = np.array(split.by_position)
    assert not by_position[:, :, held == EMPTY].any()
    for expert in range(counts_SCE.shape[2]):
        assert (by_position[:, :, held == expert].sum(axis=2) == counts_SCE[:, :, expert]).all()


@draws(30)  # each finds maximum flows
@given(splits())
def test_no_rank_computes_more_than_its_share_unless_it_must(drawn: tuple[ExactSplit, Ints]) -> None:
    split, counts_SCE = drawn
    for loads_P, rows_E in zip(computed(split, counts_SCE).T, counts_SCE.sum(axis=0), strict=True):
        share = -(-split.limit * loads_P.sum() // (SPLIT * len(loads_P)))
        assert loads_P.max() <= max(share, 1.02 * least_possible(split, rows_E) + 2)


@given(splits())
def test_a_slice_is_split_for_itself_and_the_same_everywhere(drawn: tuple[ExactSplit, Ints]) -> None:
    split, counts_SCE = drawn
    again = replace(split).table(counts_SCE.astype(np.int32))
    assert (again == split.table(counts_SCE)).all()
    for c in range(counts_SCE.shape[1]):
        assert (split.table(counts_SCE[:, c : c + 1])[:, :, 0] == again[:, :, c]).all()


def shared(limit: int) -> ExactSplit:
    """Expert 0 on all four ranks, in two nodes of two."""
    return ExactSplit.of(
        replace(Replication.local(PAIRS, [[EMPTY], [0], [0], [0]]), limit=limit), (0, 0, 1, 1)
    )


def flows(split: ExactSplit, rows_PE: list[list[int]]) -> list[list[int]]:
    """Rows of expert 0 from rank to rank."""
    table_SPCN = split.table(np.array(rows_PE)[:, None])
    by_position = table_SPCN[:, :, 0].reshape(len(rows_PE), -1)
    return by_position[:, [q for q, e in enumerate(split.by_position) if e == 0]].tolist()  # type: ignore[no-any-return]


def test_rows_stay_where_they_start_as_far_as_the_limit_allows_then_in_their_node() -> None:
    rows = [[80, 0, 0, 0], [0, 0, 0, 0], [20, 0, 0, 0], [20, 0, 0, 0]]
    assert flows(shared(4 * SPLIT), rows) == [[80, 0, 0, 0], [0] * 4, [0, 0, 20, 0], [0, 0, 0, 20]]
    assert flows(shared(4 * SPLIT // 3), rows) == [[40, 40, 0, 0], [0] * 4, [0, 0, 20, 0], [0, 0, 0, 20]]
    assert flows(shared(SPLIT), rows) == [[30, 30, 10, 10], [0] * 4, [0, 0, 20, 0], [0, 0, 0, 20]]


def test_rows_without_a_home_in_their_node_go_where_least_is_to_do() -> None:
    split = ExactSplit.of(
        replace(Replication.local(PAIRS, [[EMPTY], [0], [EMPTY], [EMPTY]]), limit=4 * SPLIT), (0, 0, 1, 1)
    )
    assert flows(split, [[0, 0, 0, 0], [0, 20, 0, 0], [40, 0, 0, 0], [0, 0, 0, 0]]) == [
        [0, 0],
        [0, 0],
        [30, 10],
        [0, 0],
    ]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 60))
def test_the_lowest_fill_up_first(heights: list[int], rows: int) -> None:
    found = filled(heights, rows)
    assert sum(found) == rows and min(found) >= 0
    after = [height + more for height, more in zip(heights, found, strict=True)]
    assert all(full <= min(after) + 1 for full, more in zip(after, found, strict=True) if more)


@pytest.mark.slow
def test_a_thousand_drifting_loads_are_even_though_plans_are_a_step_old() -> None:
    """Up to five steps old, and replicas are where they are needed; split as planned, some are not even."""
    exact, as_planned = [], []
    for step, (before, after) in enumerate(pairwise(drifting_loads(16, 1001, drift=0.005))):
        if step % 5 == 0:
            problem = expert_problem(16, 1, loads=before)
            both = (replace(problem, exact=each) for each in (True, False))
            replication, planned = map(PLANNERS["least_loaded"], both)
        computed = LayerLoad.of(after, replication, problem.costs.links.nodes).computed
        exact.append(computed.max() / computed.mean())
        if step % 5 == 4:
            computed = LayerLoad.of(after, planned).computed
            as_planned.append(computed.max() / computed.mean())
    assert max(exact) <= 1.05
    assert max(as_planned) > 1.05


def test_a_limit_is_the_mean_at_least() -> None:
    with pytest.raises(PlacementError, match="limit = 4095: ranks compute the mean at least, which is 4096"):
        replace(Replication.none(PAIRS, 1), limit=SPLIT - 1)


# ---- growth ------------------------------------------------------------------------------------------------


SLICES, NODE, DEGREES = 8, 8, (1, 2, 8)
RANKS = (256, 1024)
MOST = 5.0
"""Four times as many ranks may need this many times the memory; with P x P it would be sixteen."""


def allocated(act: Callable[[], object]) -> int:
    """The most bytes that are held at once, after what depends on the plan alone has been worked out."""
    act()
    tracemalloc.start()
    act()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def drawn(*shape: int) -> Counts:
    return np.random.default_rng(0).integers(0, 9, shape)


def of_dispatch(name: str, ranks: int) -> int:
    """Bytes of one microbatch's routes in one layer, on a rank through which others' rows pass, where any do;
    what ranks have told it is there."""
    dispatch, place = DISPATCHES[name], Place(0, ranks, NODE)
    if dispatch.joins_rows:
        maker, rows = (
            RouteMaker(dispatch, place, row_counts=True),
            np.zeros((ranks, SLICES, 1 + num_sets(NODE))),
        )
        told = rows.astype(np.int64)
        told[:, :, :17] = drawn(ranks, SLICES, 17)  # most sets of places are empty
        return allocated(lambda: maker.from_pair(told, told, DEGREES))
    maker = RouteMaker(dispatch, place)
    if not maker.needs_table:
        told = drawn(ranks, SLICES, 1)
        return allocated(lambda: maker.from_pair(told, told, DEGREES))
    gathered = drawn(ranks, SLICES, ranks)
    return allocated(lambda: maker.from_everyone(gathered, DEGREES))


@pytest.mark.parametrize("name", sorted(DISPATCHES))
def test_memory_grows_with_the_ranks_and_not_with_their_square(name: str) -> None:
    few, many = (of_dispatch(name, ranks) for ranks in RANKS)
    assert many < MOST * few
    assert many < 100 << 20


@pytest.mark.parametrize("form", ["gather", "s1", "s2", "baseline"])
def test_neither_do_shards_of_experts_need_it(form: ExpertForm) -> None:
    def bytes_of(ranks: int) -> int:
        mesh = Mesh(world_size=4 * ranks, ep_size=ranks, ep_local_size=2, tp_size=4, etp_size=4)
        shards = ShardPlace.of(form, mesh, 5)
        maker = RouteMaker(DISPATCHES["flat"], Place(1, ranks, 2), shards=shards)
        gathered = drawn(4 * ranks, SLICES, ranks)
        return allocated(lambda: maker.from_everyone(gathered, DEGREES))

    few, many = (bytes_of(ranks) for ranks in (64, 256))
    assert many < MOST * few
    assert many < 100 << 20


def test_fixed_sizes_are_worked_out_once() -> None:
    maker = RouteMaker(DISPATCHES["hierarchical_1d"], Place(0, 64, NODE))
    assert maker.even((3, 2), 2, (1, 2)) is maker.even((3, 2), 2, (1, 2))


@pytest.mark.parametrize("name", sorted(DISPATCHES))
def test_what_one_of_a_thousand_ranks_tells_the_others(name: str) -> None:
    """1,024 ranks, 256 experts: counts of a microbatch by expert, rank by rank, and no table of all sets."""
    work = Workload(
        batch=2, seq_len=8, hidden_size=8, ffn_hidden_size=8, vocab_size=8, num_experts=256, top_k=2,
        expert_matrices=2, capacity_factor=None, min_capacity=1, world_size=1024, ep_size=256,
        element_bytes=4, all_reduce_bytes=(4,), expert_all_reduce_bytes=(0,), dispatch=name, node_size=NODE,
    )  # fmt: skip
    shape = StepShape(moe_layers=(True,), microbatches=2, dispatch=DISPATCHES[name].hops)
    counts = np.zeros((1024, 2, 1, 256), np.int64)
    counts[..., :16] = 1
    cost = RoutedCost(shape, work, CLUSTER, counts)
    task = next(task for task in build_graph(shape).tasks if task.op == Op.COUNTS)
    assert allocated(lambda: cost.moves.exchanged_counts(task, 5)) < 8 << 20
