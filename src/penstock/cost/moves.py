"""Buffers that every communication task hands to the transport, in sizes. No torch: the simulator reads them.

Shapes: those of `penstock.routing.rows`; W ranks that meet in a task.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Final

import numpy as np

from penstock.apportion import Counts
from penstock.cost.cluster import ClusterConfig
from penstock.cost.placed import by_target, received_of
from penstock.cost.span import even_leg
from penstock.cost.step import StepCost
from penstock.cost.workload import Workload
from penstock.features.dispatch import DISPATCHES, Dispatch, Leg, Place
from penstock.features.routed import Move, links_of, within
from penstock.features.table import ROUTED
from penstock.graph import Task
from penstock.mesh import Group, place_in_node
from penstock.ops import Work
from penstock.ops.core import COMBINE_OF, TRANSFERS, outward
from penstock.placement import Replication
from penstock.routing.joined import distinct_rows, num_sets
from penstock.routing.legs import busier_rows
from penstock.routing.links import Links
from penstock.routing.routes import RouteMaker, ShardPlace, in_turn
from penstock.routing.rows import Placed
from penstock.routing.sizes import Floats
from penstock.step import StepShape

ROW_MOVES: Final = (*TRANSFERS, *(op for op, each in ROUTED.items() if each.sizes))
"""Ops that move rows, whose bytes follow the routing."""
FOLLOWING: Final = frozenset((*ROW_MOVES, *(op for op, each in ROUTED.items() if each.load)))
"""Transfers whose time depends on how a layer is routed, and on nothing else in which MoE layers differ."""
MOVES: Final = (*ROW_MOVES, *(op for op, each in ROUTED.items() if each.move))
"""Every op of which it is known what a rank hands to the transport."""


@dataclass(frozen=True)
class RowMoves:
    """Moves of a step whose routing is known: of rows on their way to experts and back, in whatever way they
    meet all shards of the experts, and what features move beside them.

    Attributes:
        even: The step with even routing.
        rows_PRCYE: The rows that every rank brings for every expert.
        columns: The layer of the rows that stands for each MoE layer; () = each has its own.
        places: The places of samples and replicas; None = nothing moves.
        arriving_PRCYE: The rows of the samples to which they come home; None = of those that they left.
    """

    even: StepCost
    rows_PRCYE: Counts
    columns: tuple[int, ...] = field(default=(), kw_only=True)
    places: Placed | None = field(default=None, kw_only=True)
    arriving_PRCYE: Counts | None = field(default=None, kw_only=True)
    _known_joined: dict[object, Counts] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_tables: dict[object, Counts] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def shape(self) -> StepShape:
        return self.even.shape

    @property
    def sizes(self) -> Workload:
        return self.even.workload

    @property
    def placed(self) -> Placed:
        """Where samples and replicas are, in a step in which they move."""
        assert self.places is not None, "samples or experts move"
        return self.places

    @property
    def _replications(self) -> tuple[Replication, ...]:
        return () if self.places is None else self.places.replications

    def work(self, task: Task) -> Work:
        """Return what the task asks of a rank with even routing."""
        return self.even.work(task)

    def argument(self, sent_PP: Floats) -> Floats:
        """Return the buffer of an even all-to-all that takes as long as each rank's links do here, [P].

        What leaves a node passes its card (or its device's, see `ClusterConfig.link_rate_of`) while the rest
        passes the devices' links inside.

        Args:
            sent_PP: The amount from rank to rank, in any unit; what stays on a rank takes no time.
        """
        if not self._even_s:  # one rank, which sends nothing
            return np.zeros(len(sent_PP))
        argument: Floats = self._links.rank_seconds(sent_PP) / self._even_s
        return argument

    # ---- of one rank ---------------------------------------------------------------------------------------

    def move(self, task: Task, rank: int) -> Move:
        """Return what a rank hands to the transport."""
        routed = ROUTED.get(task.op)
        if routed is not None and routed.move is not None:
            return routed.move(self, task, rank)
        row_bytes = round(self.row_bytes(task))
        if task.op not in TRANSFERS:
            whole = tuple(map(int, self._sizes(task)[rank]))
            place = self.sizes.mesh.place(rank, task.axes)
            return within(self.work(task).collective, task.axes, whole, place, row_bytes)
        # The leg towards the experts, without regard to where blocks are stored.
        (group, place, shard), work = self._place(rank), self.sizes
        stop = Place(place, work.ep_size, work.ranks_per_node)
        if self._fused(task):
            shards = ShardPlace.of(self.shape.expert_form, work.mesh, rank)
            assert shards is not None, task
            table = self.table(task)[group].sum(axis=3).reshape(-1, work.ep_size)
            maker = RouteMaker(self._legs, stop, shards=replace(shards, dealt=1))
            leg: Leg = maker.from_table(table[:, :, None, None]).cuts[1][0][0]
        else:
            leg = self._legs.legs(self._planes(task)[group, shard], stop)[self._number(task)]
        there, back = leg.input_splits, leg.output_splits
        sent, received = (there, back) if to_experts(task) else (back, there)
        return Move("all_to_all", leg.axes, sent, received, row_bytes)

    def row_bytes(self, task: Task) -> float:
        """Return the bytes of a row as the task moves it."""
        return self.even.row_bytes(outward=task.op in COMBINE_OF)

    def exchanged_counts(self, task: Task, rank: int) -> tuple[Counts, Counts]:
        """Return what a COUNTS task sends and is to receive on one rank.

        Sent: [T, C, N]. Received: the same from every rank that is asked, [W, C, N]; where a rank must know
        what the others send to each other, everything that they send, [W, T, C, N]. Where rows are split by
        the loads of the step itself, it sends its rows by expert, [C, E], and receives all ranks', [W, C, E].
        """
        assert task.microbatch is not None, task
        rows_PCE = self.rows_PRCYE[:, task.microbatch, :, self.column(task)]
        if self.splits(task):
            return rows_PCE[rank], rows_PCE[list(self.sizes.mesh.members(rank, task.axes))]
        cut = [self._by_target(rows_PCE[:, c], task) for c in range(rows_PCE.shape[1])]
        group, place, shard = self._place(rank)
        sent = self._with_rows(np.stack([table[group, place, shard] for table in cut], axis=1))
        if not self.needs_table:
            return sent, self._with_rows(np.stack([table[group, :, shard, place] for table in cut], axis=1))
        shards = slice(None) if task.axes == Group.EXPERT_SHARDS else slice(shard, shard + 1)
        whole = np.stack([table[group, :, shards] for table in cut], axis=3)
        return sent, self._with_rows(whole.reshape(-1, *whole.shape[2:]))

    def _with_rows(self, counts: Counts) -> Counts:
        """Append room for the numbers of joined rows, of any value, to the inputs of experts, [..., N]."""
        work = self.sizes
        if not work.joins_rows:
            return counts
        kinds = num_sets(work.ranks_per_node) if self._legs.joins_rows else 1
        return np.concatenate([counts, np.zeros((*counts.shape[:-1], kinds), np.int64)], axis=-1)

    @property
    def needs_table(self) -> bool:
        """Whether every rank tells every other everything that it sends."""
        work, form = self.sizes, self.shape.expert_form
        shards = ShardPlace.of(form, work.mesh, 0)
        joins = self._legs.joins_rows
        return RouteMaker(self._legs, Place(0, work.ep_size, work.ranks_per_node), joins, shards).needs_table

    # ---- of all ranks --------------------------------------------------------------------------------------

    def received(self, task: Task) -> Counts:
        """Return rows that every rank's experts get, [P]: those of all shards, whichever rank brings them."""
        return received_of(self.table(task), self.sizes)

    def busier(self, task: Task) -> Floats:
        """Return rows over every rank's link in its busier direction, as argument of the collective, [P].

        With even routing the argument is the one in the op's `work`.
        """
        collective = self.even.work(task).collective
        if collective == "leg":
            flat = not self._legs.needs_table and not self._fused(task)
            span = self.sizes.span(Group.EXPERT)
            if flat and span.nodes > 1 and span.most > 1:
                return self.argument(self._ranks(task))
            work = self.sizes  # the part of an even leg's argument that goes over the busiest rank's link
            if self._fused(task):
                share = (work.mesh.size(task.axes) - 1) / work.mesh.size(task.axes)
            else:
                share = even_leg(work.dispatch, task.op, work.nodes, work.ranks_per_node).share
            argument: Floats = self._remote(task) * (1 / share if share else 0.0)
            return argument
        sizes_PW = self._sizes(task)
        total: Floats = sizes_PW.sum(axis=1).astype(np.float64)
        members = sizes_PW.shape[1]
        if collective == "all_reduce" or members == 1:
            return total
        mesh = self.sizes.mesh
        places = np.array([mesh.place(rank, task.axes) for rank in range(len(sizes_PW))])
        own = np.take_along_axis(sizes_PW, places[:, None], axis=1)[:, 0]
        busier: Floats = np.maximum((members - 1) * own, total - own) * members / (members - 1)
        return busier

    def _remote(self, task: Task) -> Floats:
        """Return rows to or from other ranks in this leg, whichever are more, [P]."""
        work = self.sizes
        if self._fused(task):
            table_GSHT = self.table(task).sum(axis=4)
            sent_GSH, came_GT = table_GSHT.sum(axis=3) * work.etp_size, table_GSHT.sum(axis=(1, 2))
            own_GSH = np.einsum("gshs->gsh", table_GSHT)
            away: Floats = (np.maximum(sent_GSH, came_GT[:, :, None]) - own_GSH).astype(np.float64)
            return away.reshape(-1)
        number, size = self._number(task), work.ranks_per_node
        away_GHP = [
            [busier_rows(self._legs, number, plane, size) for plane in planes]
            for planes in self._planes(task)
        ]
        return np.array(away_GHP).transpose(0, 2, 1).reshape(-1).astype(np.float64)

    def crossing(self, task: Task) -> float:
        """Return rows that leave their node, or rank where there is one node, and what moves with them."""
        routed = ROUTED.get(task.op)
        crossing = (
            self._ranks if routed is None or routed.crossing is None else partial(routed.crossing, self)
        )
        links = self._links
        return float((crossing(task) * (links.across if max(links.nodes) else links.inside)).sum())

    def _ranks(self, task: Task) -> Floats:
        """Return rows from rank to rank of the world, [P, P]."""
        planes_GHST, mesh = self._planes(task), self.sizes.mesh
        rows_PP = np.zeros((mesh.world_size, mesh.world_size))
        for ranks in mesh.groups(Group.EXPERT):
            group, _, shard = self._place(ranks[0])
            rows_PP[np.ix_(ranks, ranks)] = planes_GHST[group, shard]
        return rows_PP

    @property
    def _legs(self) -> Dispatch:
        return DISPATCHES[self.sizes.dispatch]

    @cached_property
    def _links(self) -> Links:
        """The links of all ranks, in an all-to-all of all expert groups at once."""
        return links_of(self.sizes, self.even.cluster, range(self.sizes.world_size))

    @cached_property
    def _even_s(self) -> float:
        """Seconds of one unit of an even buffer, by the rates of links, as `Links` has them: of a ring."""
        cluster = self.even.cluster
        even = ClusterConfig.all_to_all(cluster, self.sizes.span(Group.EXPERT))
        return even.beta_s_per_byte / cluster.raggedness

    # ---- tables --------------------------------------------------------------------------------------------

    def _number(self, task: Task) -> int:
        """Return which leg of the dispatch a task is."""
        return [hop.op for hop in self.shape.dispatch].index(outward(task.op))

    def _planes(self, task: Task) -> Counts:
        """Return rows from rank to rank, [G, H, S, T]; joined ones cross to the same place there."""
        work = self.sizes
        if work.joins_rows:
            across = self._legs.joins_rows and self._number(task) == 0
            key = task.microbatch, task.cut.held, self.column(task), task.op in COMBINE_OF, across
            if key not in self._known_joined:
                table_GSTN = self.table(task)[:, :, 0]
                groups, ranks = table_GSTN.shape[:2]
                parts = work.nodes if across else ranks
                inputs, near = table_GSTN.reshape(groups * ranks, parts, -1), work.nearness(parts)
                joined = distinct_rows(inputs, work.top_k, near).reshape(groups, ranks, parts)
                if across:
                    nodes_GPN, joined = joined, np.zeros((groups, ranks, ranks), np.int64)
                    source, node = np.indices((ranks, parts))
                    size = work.ranks_per_node
                    joined[:, source, node * size + place_in_node(source, size)] = nodes_GPN
                self._known_joined[key] = joined
            return self._known_joined[key][:, None]
        table_GSHT: Counts = self.table(task).sum(axis=4)
        if task.cut.row_copies > 1:  # rows are gathered before they leave
            table_GSHT = np.broadcast_to(table_GSHT.sum(axis=2, keepdims=True), table_GSHT.shape)
        return table_GSHT.transpose(0, 2, 1, 3)

    def _sizes(self, task: Task) -> Counts:
        """Return the rows of every member of a task's group, by rank, [P, W]."""
        sizes = ROUTED[task.op].sizes
        assert sizes is not None, task
        return sizes(self, task)

    def table(self, task: Task) -> Counts:
        """Return rows of the task's microbatch and chunk as they travel, [G, S, H, T, N].

        The last table is kept: a leg's price asks for it rank by rank. With replicas all are.
        """
        outwards = outward(task.op) == task.op
        key = task.microbatch, task.cut.held, self.column(task), outwards
        if key not in self._known_tables:
            rows = self._dealt if outwards or self.arriving_PRCYE is None else self.arriving_PRCYE
            if self._replications:  # every slice is split by itself, as ranks tell each other
                # Where rows are split by the loads of the step, no samples move.
                rows_PCE = self._held(self.rows_PRCYE if self.splits(task) else rows, task)
                slices = [self._by_target(rows_PCE[:, c], task) for c in range(rows_PCE.shape[1])]
                self._known_tables[key] = np.sum(slices, axis=0)
            else:
                self._known_tables.clear()
                self._known_tables[key] = self._by_target(self._held(rows, task).sum(axis=1), task)
        return self._known_tables[key]

    def splits(self, task: Task) -> bool:
        """Return whether rows of the task's layer are split by the loads of the step."""
        return bool(self._replications) and self._replications[self.column(task)].limit is not None

    def _by_target(self, rows_PE: Counts, task: Task) -> Counts:
        replication = self._replications[self.column(task)] if self._replications else None
        return by_target(rows_PE, replication, self.sizes)

    @cached_property
    def _dealt(self) -> Counts:
        """The rows that every rank sends of those it brings: ranks with the same rows may deal them."""
        work = self.sizes
        if self.shape.expert_form != "s2" or work.tp_size == 1:
            return self.rows_PRCYE
        turns = [work.mesh.place(rank, Group.TENSOR) for rank in range(work.world_size)]
        return in_turn(self.rows_PRCYE, np.array(turns)[:, None, None, None, None], work.tp_size)

    def brought(self, task: Task) -> Counts:
        """Return the rows that every rank brings in the slices that a task has, [P, C, E]."""
        return self._held(self.rows_PRCYE, task)

    def _held(self, rows_PRCYE: Counts, task: Task) -> Counts:
        """Return the rows of the slices that a task has, [P, C, E]."""
        assert task.microbatch is not None and task.chunk is not None, task
        held = task.cut.held
        rows: Counts = rows_PRCYE[:, task.microbatch, held.start : held.stop, self.column(task)]
        return rows

    # ---- places --------------------------------------------------------------------------------------------

    @staticmethod
    def _fused(task: Task) -> bool:
        """Return whether a row goes to every shard of its expert at once."""
        return task.axes == Group.EXPERT_SHARDS

    def _place(self, rank: int) -> tuple[int, int, int]:
        """Return a rank's group of ranks that hold all experts, its place there, and its shard."""
        mesh = self.sizes.mesh
        group = mesh.group(rank, Group.EXPERT_SHARDS)
        return group, mesh.place(rank, Group.EXPERT), mesh.place(rank, Group.SHARDS)

    def column(self, task: Task) -> int:
        """Return the layer of the rows that stands for the task's layer."""
        layer = self.moe_layer(task)
        return self.columns[layer] if self.columns else layer

    def moe_layer(self, task: Task) -> int:
        """Return the number of the task's layer among MoE layers."""
        return sum(self.shape.moe_layers[: task.layer])


def to_experts(task: Task) -> bool:
    """Return whether data goes to the experts: rows in dispatch, or in backward gradients in combine."""
    return (task.op in COMBINE_OF) is task.forward
