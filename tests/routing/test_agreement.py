"""What the simulator prices and virtual ranks send is what transports are told to send, row by row.

Counts of one step are given to both: to the cost model as a whole, to every rank's maker of routes as ranks
exchange them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.apportion import Counts
from penstock.cost import RoutedCost, Workload
from penstock.cost.moves import to_experts
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES, Place
from penstock.features.expert_sharding import feature as shards
from penstock.graph import Task
from penstock.mesh import Group, node_of
from penstock.ops import Op
from penstock.ops.core import TRANSFERS, outward
from penstock.placement import SPLIT, ExpertPlacement, Replication
from penstock.routing.joined import joined_legs, num_sets, sets_of
from penstock.routing.legs import busier_rows, legs_of, place_in
from penstock.routing.replicas import ExactSplit
from penstock.routing.routes import RouteMaker, Routes, ShardPlace, Shares, in_turn
from penstock.routing.rows import Placed
from penstock.routing.samples import ExchangeGroup, SampleTable, settle
from penstock.step import Sharing, StepShape
from penstock.step.shape import ExpertForm
from tests.support.draws import draws
from tests.support.replicas import random_replication
from tests.workloads.strategies import CLUSTER

EXPERTS, SAMPLES, LENGTH, TOP_K, LAYERS = 8, 4, 6, 2, 2
LAYOUTS = [(1, 1, 8, 2), (1, 1, 8, 4), (1, 1, 4, 2), (1, 1, 1, 1), (1, 1, 2, 1)]
"""tp, etp, ep of eight ranks, and ranks of an expert group in one node."""
SHARED = [(2, 2, 4, 2), (2, 1, 4, 2), (1, 2, 4, 2), (4, 2, 2, 1), (2, 4, 2, 2), (4, 4, 1, 1), (8, 4, 2, 1)]


@dataclass(frozen=True)
class Step:
    """One step and its routing."""

    shape: StepShape
    work: Workload
    counts: Counts
    placed: Placed | None = None

    @property
    def cost(self) -> RoutedCost:
        return RoutedCost(self.shape, self.work, CLUSTER, self.counts, placed=self.placed)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Dispatches, chunks, capacity or none, replicas, shards of experts."""
    shared = draw(st.booleans())
    tp, etp, ep, node = draw(st.sampled_from(SHARED if shared else LAYOUTS))
    nodes = node < ep
    by_rank = [name for name, each in DISPATCHES.items() if not each.joins_rows and (nodes or name == "flat")]
    form: ExpertForm = draw(st.sampled_from(["gather", "s1", "s2", "baseline"])) if shared else "gather"
    dispatch = draw(st.sampled_from(by_rank if form == "gather" else ["flat"]))
    capacity = draw(st.sampled_from([None, None, 0.7, 1.25]))
    random = Random(draw(st.integers(0, 999)))
    hosts = not shared and capacity is None and ep > 1 and draw(st.booleans())
    work = Workload(
        batch=SAMPLES, seq_len=LENGTH, hidden_size=8, ffn_hidden_size=16, vocab_size=16, num_experts=EXPERTS,
        top_k=TOP_K, expert_matrices=2, capacity_factor=capacity, min_capacity=1, world_size=8, ep_size=ep,
        element_bytes=4, all_reduce_bytes=(800,) * 3, expert_all_reduce_bytes=(0,) * 3, dispatch=dispatch,
        node_size=node, tp_size=tp, etp_size=etp, partial_all_reduce_bytes=(0,) * 3,
        devices_per_node=0 if not shared else 8, dense_ffn_hidden_size=16,
    )  # fmt: skip
    shape = StepShape(
        moe_layers=(True, False, True),
        microbatches=draw(st.integers(1, 3)),
        chunks=draw(st.integers(1, 3)),
        degree_backward=draw(st.integers(0, 3)),
        exchange_counts=capacity is None,
        dispatch=DISPATCHES[dispatch].hops,
        sharing=Sharing(tp_size=tp, etp_size=etp),
        expert_form=form,
        replica_slots=1 if hosts else 0,
    )
    counts = routed(random, work.mesh.size(Group.DATA))
    if not hosts:
        return Step(shape, work, counts)
    placement = ExpertPlacement.even(EXPERTS, ep)
    limits = draw(st.sampled_from([(None, SPLIT), (SPLIT, 2 * SPLIT)]))
    replications = tuple(replace(random_replication(placement, 1, random), limit=limit) for limit in limits)
    return Step(shape, work, counts, Placed.still(counts, replications))


def routed(random: Random, groups: int) -> Counts:
    """Token copies of samples for experts, unevenly many; no token has an expert twice."""
    rng = np.random.default_rng(random.randrange(9999))
    odds = rng.dirichlet(np.full(EXPERTS, 0.5))
    tokens = rng.gumbel(size=(groups, SAMPLES, LAYERS, LENGTH, EXPERTS)) + np.log(odds + 1e-9)
    chosen = np.argsort(-tokens, axis=-1)[..., :TOP_K]
    return np.stack([(chosen == expert).sum(axis=(-1, -2)) for expert in range(EXPERTS)], axis=-1)


def routes_of(step: Step, rows_PRCYE: Counts, rank: int, microbatch: int, moe_layer: int) -> Routes:
    """The routes that a real rank makes from what ranks tell each other."""
    work, mesh = step.work, step.work.mesh
    place = Place(mesh.place(rank, Group.EXPERT), work.ep_size, work.ranks_per_node)
    replication = (
        step.placed.replications[moe_layer] if step.placed is not None and step.placed.replications else None
    )
    exact = replication is not None and replication.limit is not None
    nodes = tuple(node_of(each, work.ranks_per_node) for each in range(work.ep_size))
    split = ExactSplit.of(replication, nodes) if exact and replication is not None else None
    shard_place = ShardPlace.of(step.shape.expert_form, mesh, rank)
    maker = RouteMaker(DISPATCHES[work.dispatch], place, shards=shard_place, split=split)
    members = mesh.members(rank, Group.EXPERT_SHARDS if shard_place else Group.EXPERT)
    told_SCX = rows_PRCYE[list(members), microbatch, :, moe_layer]
    if replication is not None and not exact:
        told_SCX = by_position(told_SCX, replication)
    degrees = step.shape.transfer_degrees
    if maker.needs_table:
        return maker.from_everyone(told_SCX, degrees)
    table_SPCN = told_SCX.reshape(*told_SCX.shape[:2], work.ep_size, -1).swapaxes(1, 2)
    return maker.from_pair(table_SPCN[place.rank], table_SPCN[:, place.rank], degrees)


def by_position(rows_SCE: Counts, replication: Replication) -> Counts:
    """Rows of experts at their positions, written out: an expert's rows are cut at its parts' ends."""
    found = np.zeros((*rows_SCE.shape[:2], replication.positions), np.int64)
    for source, piece in np.ndindex(*rows_SCE.shape[:2]):
        for expert, parts in enumerate(replication.splits[source]):
            rows, upto = int(rows_SCE[source, piece, expert]), 0
            for part in sorted(parts):
                found[source, piece, part.position] += (
                    upto + part.parts
                ) * rows // SPLIT - upto * rows // SPLIT
                upto += part.parts
    return found


def check(cost: RoutedCost, task: Task, rank: int, routes: Routes) -> None:
    """Compare a task on one rank. Seconds of a transfer are those of its busier direction, so this, too."""
    move = cost.moves.move(task, rank)
    if task.op in TRANSFERS:
        legs = routes.cuts[task.cut.chunks][task.chunk or 0]
        if not legs:  # alone: what the cost model hands over stays
            assert len(move.input_splits) == 1
            return
        leg = legs[[hop.op for hop in cost.shape.dispatch].index(outward(task.op))]
        there = leg.input_splits, leg.output_splits
        assert (move.input_splits, move.output_splits) == (there if to_experts(task) else there[::-1]), task
        assert move.group == leg.axes
        if task.op in (Op.DISPATCH, Op.COMBINE) and move.group != Group.EXPERT_SHARDS:
            place = Place(cost.workload.mesh.place(rank, Group.EXPERT), *sizes(cost.workload))
            own = place_in(leg.axes, place)
            away = max(sum(splits) - splits[own] for splits in there)
            assert cost.moves._remote(task)[rank] == away
    elif task.op in shards.ROUTED and move.collective:
        wanted = rows_of_members(task, routes.shares[task.cut.first : task.cut.stop], cost.workload.tp_size)
        if move.collective == "all_reduce":
            assert move.input_splits == (sum(wanted),)
        else:
            assert (move.output_splits if move.collective == "all_gather" else move.input_splits) == wanted


def sizes(work: Workload) -> tuple[int, int]:
    return work.ep_size, work.ranks_per_node


def rows_of_members(task: Task, shares: tuple[Shares, ...], dealt: int) -> tuple[int, ...]:
    """The rows of every member as handlers read them (`runtime/features/expert_sharding.py`)."""
    if task.op in (Op.DEAL_SLOTS, Op.GATHER_SLOTS):
        by_turn = [
            sum(int(in_turn(np.array(each.counts), t, dealt).sum()) for each in shares) for t in range(dealt)
        ]
        return tuple(by_turn)
    before = task.op in (Op.ROWS_GATHER, Op.ROWS_KEEP)
    rows = [[sum(blocks) for blocks in each.blocks] if before else each.peers for each in shares]
    return tuple(map(sum, zip(*rows, strict=True)))


@pytest.mark.slow
@given(step=steps())
def test_the_simulator_and_transports_agree(step: Step) -> None:
    cost, work = step.cost, step.work
    tasks = [
        task for task in build_graph(step.shape).tasks if task.op in (*TRANSFERS, *shards.ROUTED, Op.EXPERTS)
    ]
    for layer, microbatch in ((y, m) for y in (0, 2) for m in range(step.shape.microbatches)):
        held = [task for task in tasks if (task.layer, task.microbatch) == (layer, microbatch)]
        for rank in range(work.world_size):
            routes = routes_of(step, cost.rows, rank, microbatch, layer // 2)
            for task in held:
                if task.op != Op.EXPERTS:
                    check(cost, task, rank, routes)
                    continue
                came = [sum(s.rows_per_expert) for s in routes.at_experts[task.cut.first : task.cut.stop]]
                assert cost.moves.received(task)[rank] == sum(came)


@st.composite
def moving(draw: st.DrawFn) -> tuple[Step, list[Counts]]:
    """A step whose samples get random homes, and these: the device of every sample by MoE layer, [I]."""
    name = draw(st.sampled_from(["flat", "hierarchical_1d", "hierarchical_2d"]))
    work = Workload(
        batch=SAMPLES, seq_len=LENGTH, hidden_size=8, ffn_hidden_size=16, vocab_size=16, num_experts=EXPERTS,
        top_k=TOP_K, expert_matrices=2, capacity_factor=None, min_capacity=1, world_size=8, ep_size=8,
        element_bytes=4, all_reduce_bytes=(800,) * 3, expert_all_reduce_bytes=(0,) * 3, dispatch=name,
        node_size=2,
    )  # fmt: skip
    shape = StepShape(
        moe_layers=(True, False, True),
        microbatches=1,
        chunks=draw(st.sampled_from([1, 2])),
        degree_backward=draw(st.sampled_from([1, 2, 4])),
        dispatch=DISPATCHES[name].hops,
        moves_samples=True,
    )
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    held, homes = [np.arange(8 * SAMPLES).reshape(8, SAMPLES)], []
    for _ in range(LAYERS):
        device_DB = np.repeat(np.arange(8)[:, None], SAMPLES, axis=1)
        for chunk in np.array_split(np.arange(SAMPLES), shape.slices):  # a device keeps its number of each
            device_DB[:, chunk] = rng.permutation(device_DB[:, chunk].ravel()).reshape(8, -1)
        after = np.empty_like(held[-1])
        chunk_B = np.repeat(np.arange(shape.slices), SAMPLES // shape.slices)
        order = np.lexsort((np.tile(chunk_B, 8), device_DB.ravel()))
        after.reshape(-1)[:] = held[-1].reshape(-1)[order]
        held.append(after)
        homes.append(device_DB.reshape(-1))
    counts = routed(Random(int(rng.integers(999))), 8)
    return Step(shape, work, counts, Placed(np.stack(held))), homes


@draws(40)
@given(case=moving())
def test_rows_of_samples_that_move_leave_and_come_home_alike(case: tuple[Step, list[Counts]]) -> None:
    step, homes = case
    cost, work, placed = step.cost, step.work, step.placed
    assert placed is not None
    leaving = placed.leaving(step.counts)
    sizes = {"ranks": 8, "positions": EXPERTS, "chunks": step.shape.slices}
    exchange_group = ExchangeGroup.alone([node_of(rank, 2) for rank in range(8)])
    tasks = [task for task in build_graph(step.shape).tasks if task.op in TRANSFERS]
    for moe_layer, device_I in enumerate(homes):
        gathered = leaving[:, :, moe_layer].reshape(-1, EXPERTS)
        table = SampleTable.of(gathered, [SAMPLES] * 8, exchange_group, **sizes)
        for rank in range(8):
            maker = RouteMaker(DISPATCHES[work.dispatch], Place(rank, 8, 2))
            degrees = step.shape.transfer_degrees
            there = maker.from_table(table.sent(table.device_I), degrees)
            back = settle(table, device_I, rank, maker, degrees).routes
            for task in tasks:
                if task.layer == 2 * moe_layer:
                    check(cost, task, rank, there if outward(task.op) == task.op else back)


@given(nodes=st.integers(1, 3), size=st.integers(1, 3), seed=st.integers(0, 999))
def test_joined_rows_need_no_sets_for_their_sizes(nodes: int, size: int, seed: int) -> None:
    """The cost model knows how many rows are for every node and every rank, and ranks know the sets."""
    ranks, node_once = nodes * size, DISPATCHES["node_once"]
    table = np.random.default_rng(seed).integers(0, 3, (ranks, nodes, num_sets(size)))
    across = np.zeros((ranks, ranks), np.int64)
    for rank, node in np.ndindex(ranks, nodes):
        across[rank, node * size + Place(rank, ranks, size).local] = table[rank, node].sum()
    inside = (table @ sets_of(size)).reshape(ranks, ranks)
    for rank in range(ranks):
        place = Place(rank, ranks, size)
        ((first, last),) = joined_legs(table[rank, :, :, None], table[:, place.node, :, None], place)
        for number, (exact, rows) in enumerate(((first, across), (last, inside))):
            leg = node_once.legs(rows, place)[number]
            splits = leg.input_splits, leg.output_splits
            assert splits == (exact.input_splits, exact.output_splits)
            own = place_in(leg.axes, place)
            away = max(sum(each) - each[own] for each in splits)
            assert busier_rows(node_once, number, rows, size)[rank] == away


@given(nodes=st.integers(1, 3), size=st.integers(1, 3), seed=st.integers(0, 999))
def test_a_dispatch_of_ones_own_is_asked_for_its_legs(nodes: int, size: int, seed: int) -> None:
    """One that is not written as stops gets the same tables, chunk by chunk."""

    class Own:
        def __init__(self, name: str) -> None:
            self.name, self._of = name, DISPATCHES[name]
            self.hops, self.needs_table, self.joins_rows = self._of.hops, True, False
            self.legs = self._of.legs

    ranks = nodes * size
    table = np.random.default_rng(seed).integers(0, 4, (ranks, ranks, 4))
    for name in ("flat", "hierarchical_1d", "hierarchical_2d"):
        own = Own(name)
        for rank in range(ranks):
            place, degrees = Place(rank, ranks, size), (1, 2, 4)
            rows_at = lambda s, t: table[s, t]  # noqa: E731
            assert legs_of(own, place, rows_at, degrees) == legs_of(DISPATCHES[name], place, rows_at, degrees)
        for number in range(len(own.hops)):
            by_legs, by_stops = (
                busier_rows(each, number, table[:, :, 0], size) for each in (own, DISPATCHES[name])
            )
            assert (by_legs == by_stops).all()
