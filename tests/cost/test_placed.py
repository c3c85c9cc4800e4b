"""Steps whose samples and experts move: who has which sample, where rows go, and what links carry."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.apportion import Counts
from penstock.cost import ClusterConfig, ProfiledCluster, RoutedCost, StepCost, Workload, routing_sizes
from penstock.cost.clusters import find_cluster
from penstock.cost.moves import RowMoves
from penstock.cost.placed import rank_loads
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.problem import copies_of
from penstock.features.sample_placement.prices import SampleMover, _by_position, device_groups
from penstock.graph import Task
from penstock.mesh import Group, Mesh
from penstock.ops import Op
from penstock.placement import EMPTY, SPLIT, ExpertPlacement, Replication
from penstock.routing.replicas import rows_by_position
from penstock.routing.rows import Placed
from penstock.routing.sizes import split_sizes
from penstock.runtime.features.sample_placement import Habits, Relocation, SampleMoving
from penstock.step import StepShape
from penstock.topology import Layout, ParallelConfig
from penstock.workloads import Routing, RoutingConfig, routing_of
from tests.plan.problems import problem
from tests.support.draws import draws
from tests.support.replicas import random_replication
from tests.workloads.strategies import CLUSTER, steps

Step = tuple[StepShape, Workload, Routing]
WORK = replace(
    problem((True, False, True), ranks=8).workload,
    seq_len=16,
    hidden_size=8,
    ffn_hidden_size=12,
    num_experts=8,
    ep_size=8,
)
SHAPE = StepShape(moe_layers=(True, False, True))


def counts_of(text: str, work: Workload = WORK, step: int = 0) -> Counts:
    return routing_of(RoutingConfig.parse(text), routing_sizes(work, 2)).counts(step)


def transfers(shape: StepShape = SHAPE) -> list[Task]:
    return [task for task in build_graph(shape).tasks if task.op in (Op.DISPATCH, Op.COMBINE)]


# ---- samples -----------------------------------------------------------------------------------------------


@given(steps(capacity=False))
def test_what_stays_costs_what_it_costs_without_a_word_of_placement(step: Step) -> None:
    shape, work, routing = step
    counts = routing.counts(0)
    plain = RoutedCost(shape, work, CLUSTER, counts)
    still = replace(plain, placed=Placed.still(counts))
    for task in build_graph(shape).tasks:
        assert (plain(task) == still(task)).all(), task


@draws(20)  # each solves an assignment for every layer, microbatch and slice
@given(steps(capacity=False))
def test_every_rank_keeps_as_many_samples_of_every_slice_and_none_is_lost(step: Step) -> None:
    shape, work, routing = step
    held_YDB = SampleMover(work=work, shape=shape).placed(routing.counts(0)).held_YDB
    first_DB = held_YDB[0]
    groups = device_groups(work)
    start = 0
    for microbatch in split_sizes(work.batch, shape.microbatches):
        for size in split_sizes(microbatch, shape.slices):
            places = np.arange(start, start + size)
            for group in groups:
                cells = np.ix_(np.array(group.devices), places)
                for now_DB in held_YDB:
                    assert sorted(now_DB[cells].ravel()) == sorted(first_DB[cells].ravel())
            start += size


@pytest.mark.parametrize("shares", [(1, 2, 4), (2, 2, 4), (2, 4, 2), (4, 2, 4), (4, 1, 8)])
def test_samples_move_between_the_devices_that_exchange_rows(shares: tuple[int, int, int]) -> None:
    """Prices assume the runtime's groups, also where experts have more shards than attention, or fewer."""
    sizes: dict[str, Any] = dict(zip(("tp_size", "etp_size", "ep_size"), shares, strict=True))
    layout = Layout.build(ParallelConfig(processes=8, **sizes), 8, 0, WORK.num_experts, node_size=8)
    work = replace(WORK, **sizes, node_size=0, devices_per_node=8)
    ran = Relocation.on(layout, SampleMoving(), Habits(), packs=False).exchange_group.planes
    assert [(each.devices, each.device_P) for each in device_groups(work)] == [
        (plane.devices, plane.device_P) for plane in ran
    ]
    counts = counts_of("dirichlet,dirichlet_concentration=0.1", work=work)
    placed = SampleMover(work=work, shape=SHAPE).placed(counts)
    for group in device_groups(work):
        homes = set(placed.held_YDB[0][list(group.devices)].ravel())
        assert all(set(held[list(group.devices)].ravel()) == homes for held in placed.held_YDB)


def test_rows_come_home_to_where_the_next_layer_finds_its_samples() -> None:
    counts = counts_of("dirichlet,dirichlet_concentration=0.1")
    placed = SampleMover(work=WORK, shape=SHAPE).placed(counts)
    leaving, arriving = placed.leaving(counts), placed.arriving(counts)
    assert (leaving[:, :, 0] == counts[:, :, 0]).all()
    assert (leaving.sum(axis=(0, 1)) == arriving.sum(axis=(0, 1))).all()
    samples_before = placed.held_YDB[1]
    assert (leaving.reshape(32, 2, 8)[:, 1] == counts.reshape(32, 2, 8)[samples_before.ravel(), 1]).all()
    for layer in range(2):
        assert placed.moved(layer, 0, WORK.batch).sum() == 32
        assert (placed.moved(layer, 0, WORK.batch).sum(axis=0) == WORK.batch).all()


@pytest.mark.parametrize("predicts", [False, True])
def test_moved_samples_send_less_across_nodes_where_they_have_favourites(predicts: bool) -> None:
    counts = counts_of("dirichlet,dirichlet_concentration=0.05")
    work = replace(WORK, wire_row_bytes=8 * 4 * 4)  # rows weigh more than what moves beside them
    plain = RoutedCost(SHAPE, work, CLUSTER, counts)
    moved = SampleMover(work=work, shape=SHAPE, predicts=predicts).placed(counts)
    assert replace(plain, placed=moved).crossing_rows(transfers()) < 0.9 * plain.crossing_rows(transfers())


def test_rows_that_bring_the_residual_save_more_and_leave_little_to_follow() -> None:
    counts = counts_of("dirichlet,dirichlet_concentration=0.05")
    crossing, row_bytes = {}, {}
    for carries in (False, True):
        shape = replace(SHAPE, moves_samples=True, carries_residual=carries)
        placed = SampleMover(work=WORK, shape=shape).placed(counts)
        cost, tasks = RoutedCost(shape, WORK, CLUSTER, counts, placed=placed), build_graph(shape).tasks
        crossing[carries] = cost.crossing_rows(tasks)
        first = {task.op: task for task in reversed(tasks) if task.forward}
        row_bytes[carries] = {op: cost.moves.move(first[op], 0).row_bytes for op in ("D", "C", "SM")}
    assert crossing[True] < 0.9 * crossing[False]
    facts_bytes = 8 + 16 * 3 * 8
    assert row_bytes[False] == {"D": 32, "C": 32, "SM": facts_bytes + 16 * (32 + 8)}
    assert row_bytes[True] == {"D": 32 + 8, "C": 32, "SM": facts_bytes}


# ---- experts -----------------------------------------------------------------------------------------------


def halved() -> Replication:
    """The first expert is a replica of the last rank, which computes its own rows of it."""
    placement = ExpertPlacement.even(8, 8)
    return Replication.local(placement, [*[[EMPTY]] * 7, [0]])


def test_rows_by_position_are_all_rows_where_replications_send_them() -> None:
    rows_PE = np.arange(64).reshape(8, 8)
    none = rows_by_position(rows_PE, Replication.none(ExpertPlacement.even(8, 8), 1), WORK.mesh).reshape(
        8, 8, 2
    )
    assert (none[:, :, 0] == rows_PE).all() and not none[:, :, 1].any()
    some = rows_by_position(rows_PE, halved(), WORK.mesh).reshape(8, 8, 2)
    assert some[7, 7, 1] == rows_PE[7, 0] and some[7, 0, 0] == 0
    assert (some[:7] == none[:7]).all()


def shares(replication: Replication) -> Counts:
    """Parts of SPLIT of the rows from a rank for an expert that go to every position, [ranks, E, H]."""
    ranks, experts = replication.placement.ranks, replication.placement.num_experts
    found = np.zeros((ranks, experts, replication.positions), np.int64)
    for rank, expert in product(range(ranks), range(experts)):
        for part in replication.splits[rank][expert]:
            found[rank, expert, part.position] += part.parts
    return found


@given(st.integers(1, 3), st.sampled_from([2, 4, 8]), st.randoms(use_true_random=False))
def test_rows_are_split_as_the_whole_table_of_shares_says(slots: int, ep_size: int, random: Random) -> None:
    work = replace(WORK, ep_size=ep_size, node_size=1)
    replication = random_replication(ExpertPlacement.even(8, ep_size), slots, random)
    rows_PE = np.array([[random.randrange(1000) for _ in range(8)] for _ in range(8)])
    place_P = np.array([work.mesh.place(rank, Group.EXPERT) for rank in range(8)])
    shares_PEH = shares(replication)[place_P]
    upto_PEH = np.cumsum(shares_PEH, axis=2) * rows_PE[:, :, None] // SPLIT
    wanted_PH = np.diff(upto_PEH, axis=2, prepend=0).sum(axis=1)
    assert (rows_by_position(rows_PE, replication, work.mesh) == wanted_PH).all()
    by_position_PH = (rows_PE[:, :, None] * shares_PEH).sum(axis=1) // SPLIT
    assert (_by_position(rows_PE, place_P, replication) == by_position_PH).all()


def test_no_table_of_all_ranks_experts_and_positions_is_made() -> None:
    """With 512 ranks and experts it would take gigabytes, twice for every layer and slice."""
    ranks = 64
    work = replace(WORK, world_size=ranks, ep_size=ranks, num_experts=ranks)
    replication = Replication.none(ExpertPlacement.even(ranks, ranks), 1)
    rows_PE = np.ones((ranks, ranks), np.int64)
    whole_bytes = replication.positions * rows_PE.nbytes
    for make in (
        lambda: rows_by_position(rows_PE, replication, work.mesh),
        lambda: _by_position(rows_PE, np.arange(ranks), replication),
    ):
        tracemalloc.start()
        try:
            assert make().sum() == ranks**2
            assert tracemalloc.get_traced_memory()[1] < whole_bytes / 4
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(("ep_size", "etp_size"), [(8, 1), (4, 1), (2, 1), (4, 2), (2, 2)])
def test_a_group_of_ranks_plans_for_its_own_rows(ep_size: int, etp_size: int) -> None:
    """As at run time: each of the groups that share no experts, however many there are."""
    work = replace(WORK, ep_size=ep_size, etp_size=etp_size)
    counts = counts_of("hot_expert,hot_share=0.5", work)
    share = ep_size * etp_size / work.world_size
    assert rank_loads(counts, SHAPE, work).sum() == pytest.approx(share * counts.sum(), rel=0.02)


def test_rows_that_are_split_by_their_own_loads_are_even_and_all_ranks_are_told_of_all() -> None:
    """Split as the replication says, replicas would compute the rows of their own ranks alone."""
    shape = replace(SHAPE, replica_slots=1, chunks=2)
    counts = counts_of("hot_expert,hot_share=0.5")
    hot = int(rank_loads(counts, shape, WORK)[0].sum(axis=0).argmax())
    replicas = [[hot] if (rank - hot) % 2 else [EMPTY] for rank in range(8)]
    by_rank = Replication.local(ExpertPlacement.even(8, 8), replicas)
    imbalance = {}
    for replication in (by_rank, replace(by_rank, limit=SPLIT)):
        hosted = RoutedCost(
            shape, WORK, CLUSTER, counts, placed=Placed.still(counts, (replication, replication))
        )
        tasks = [task for task in build_graph(shape).tasks if task.layer == 0]
        imbalance[replication.limit] = hosted.imbalance(tasks)
        there = [task for task in tasks if task.op == Op.DISPATCH and task.forward]
        received = sum(hosted.moves.move(task, rank).output_splits[0] for task in there for rank in range(8))
        assert received == rank_loads(counts, shape, WORK)[0][0].sum()
        count = next(task for task in tasks if task.op == Op.COUNTS)
        sent, told = hosted.moves.exchanged_counts(count, 3)
        assert sent.shape == ((8, 2, 2) if replication is by_rank else (2, 8))
        assert told.shape == ((8, 2, 2) if replication is by_rank else (8, 2, 8))
        as_planned = RoutedCost(shape, WORK, CLUSTER, counts)
        assert (hosted(count) > as_planned(count)).all() == (replication is not by_rank)
    assert imbalance[SPLIT] < 0.7 * imbalance[None]


def test_replicas_take_load_off_their_owners_and_their_parameters_cross_links() -> None:
    shape = replace(SHAPE, replica_slots=1)
    counts = counts_of("hot_expert,hot_share=0.5")
    plain = RoutedCost(shape, WORK, CLUSTER, counts)
    loads = rank_loads(counts, shape, WORK)
    assert loads.shape == (2, 8, 8) and loads.sum() == counts.sum()
    hot = int(loads[0].sum(axis=0).argmax())
    replicas = [[EMPTY] if rank == hot else [hot] for rank in range(8)]
    replication = Replication.local(ExpertPlacement.even(8, 8), replicas)
    assert copies_of(replication)[hot].sum() == copies_of(replication).sum() == 7
    hosted = replace(
        plain, placed=Placed.still(counts, (replication, Replication.none(replication.placement, 1)))
    )
    tasks = build_graph(shape).tasks
    first = [task for task in tasks if task.layer == 0]
    assert hosted.imbalance(first) < 1.2
    assert plain.imbalance(first) > 3
    for op in (Op.REPLICA_PARAMETERS, Op.REPLICA_GRADIENTS):
        busy, idle = (next(t for t in tasks if (t.op, t.layer) == (op, layer)) for layer in (0, 2))
        assert hosted(busy)[hot] > plain(busy)[0] and not hosted(idle).any()


def test_bringing_replicas_costs_what_they_weigh_however_many_slots_are_empty() -> None:
    counts, cluster = counts_of("hot_expert,hot_share=0.5"), replace(CLUSTER, link_latency_s=1e-9)

    def seconds(op: str, slots: int) -> list[float]:
        empty = [EMPTY] * slots
        replication = Replication.local(ExpertPlacement.even(8, 8), [empty, *[[0, *empty[1:]]] * 7])
        shape, placed = replace(SHAPE, replica_slots=slots), Placed.still(counts, (replication, replication))
        task = next(each for each in build_graph(shape).tasks if each.op == op)
        found: list[float] = RoutedCost(shape, WORK, cluster, counts, placed=placed)(task).tolist()
        return found

    for op in (Op.REPLICA_PARAMETERS, Op.REPLICA_GRADIENTS):
        assert max(seconds(op, 1)) > 0
        for slots in (2, 4):
            assert seconds(op, slots) == pytest.approx(seconds(op, 1))


def test_rows_by_position_are_worked_out_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Replication]()

    def counted(rows_PE: Counts, replication: Replication, mesh: Mesh) -> Counts:
        calls.append(replication)
        return rows_by_position(rows_PE, replication, mesh)

    monkeypatch.setattr("penstock.cost.placed.rows_by_position", counted)
    work = replace(WORK, dispatch="hierarchical_2d")
    shape = replace(SHAPE, replica_slots=1, dispatch=DISPATCHES["hierarchical_2d"].hops)
    counts = counts_of("zipf")
    placed = Placed.still(counts, (halved(), halved()))
    cost = RoutedCost(shape, work, CLUSTER, counts, placed=placed)
    assert cost(next(task for task in build_graph(shape).tasks if task.op == Op.DISPATCH)).max() > 0
    assert len(calls) == 1


# ---- links -------------------------------------------------------------------------------------------------


GPUS = ProfiledCluster.build(find_cluster("2x4xH100,net=8x400gbit"))


def moves_of(work: Workload, cluster: ClusterConfig) -> RowMoves:
    return RowMoves(StepCost(SHAPE, work, cluster), np.zeros((0,), np.int64))


@given(
    nodes=st.sampled_from([1, 2, 4]),
    per_node=st.sampled_from([1, 2, 4]),
    inside=st.sampled_from([1.0, 8.0]),
    shared=st.booleans(),
)
def test_even_tables_are_even_buffers(nodes: int, per_node: int, inside: float, shared: bool) -> None:
    ranks = nodes * per_node
    work = replace(WORK, world_size=ranks, ep_size=ranks, node_size=per_node, devices_per_node=per_node)
    cluster = ClusterConfig(intra_bytes_per_s=inside * 1e9, link_rate_of="node" if shared else "device")
    for each in (cluster, GPUS):
        argument = moves_of(work, each).argument(np.full((ranks, ranks), 3.0))
        assert argument == pytest.approx(0.0 if ranks == 1 else 3.0 * ranks)


def test_rows_inside_a_node_do_not_wait_for_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterConfig(link_bytes_per_s=1e6, intra_bytes_per_s=1e9, link_rate_of="node")
    links, near, far = moves_of(WORK, cluster), np.zeros((8, 8)), np.zeros((8, 8))
    near[0, 1], far[0, 2] = 1.0, 1.0
    assert links.argument(near).max() < 0.01 * links.argument(far).max()
    for sent, crossing in ((near, 0.0), (far, 1.0)):
        monkeypatch.setattr(RowMoves, "_ranks", lambda moves, task, sent=sent: sent)
        assert links.crossing(transfers()[0]) == crossing
    assert links.argument(far)[1] == links.argument(far)[0] > 0  # one card for both
    assert WORK.mesh.groups(Group.EXPERT) == (tuple(range(8)),)
