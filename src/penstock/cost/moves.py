"""Buffers that every communication task hands to the transport, in sizes. No torch: the simulator reads them.

Shapes: those of `penstock.cost.rows`; W ranks that meet in a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.apportion import Counts
from penstock.cost.joined import distinct_rows
from penstock.cost.legs import even_leg
from penstock.cost.links import NodeLinks
from penstock.cost.rows import by_source_and_target, dealt, in_turn
from penstock.cost.step import StepCost
from penstock.cost.workload import split_sizes
from penstock.dispatch import DISPATCHES, Dispatch, Leg, Place
from penstock.dispatch.base import place_in
from penstock.dispatch.node_once import joined_sizes, num_sets
from penstock.graph import Task
from penstock.mesh import Axes, Group, place_in_node
from penstock.ops import Op, shards, tensor
from penstock.ops.transfers import HOME, TRANSFERS, outward
from penstock.ops.work import Collective
from penstock.placement import ExpertPlacement

Rows = npt.NDArray[np.float64]
SizesOf = Callable[[Task], Counts]

ROW_MOVES: Final = (*TRANSFERS, *shards.MOVES)
TOKEN_MOVES: Final = (*tensor.MOVES, Op.PEAKS, Op.CHOICES)


@dataclass(frozen=True)
class Move:
    """Buffers that a task hands to the transport on one rank; `collective` "" = none.

    input_splits, output_splits: rows of `row_bytes` to and from every member of the group; of an all-gather
    and an all-reduce the first is this rank's rows.
    """

    collective: Collective
    group: Axes
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    row_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes of the buffer that is handed over."""
        return sum(self.input_splits) * self.row_bytes


def within(collective: Collective, group: Axes, sizes: tuple[int, ...], place: int, row_bytes: int) -> Move:
    """Return the move of a collective whose whole tensor has rows of these sizes, one size per member.

    place: this rank's.
    """
    mine = (sizes[place],)
    match collective:
        case "all_gather":
            return Move(collective, group, mine, sizes, row_bytes)
        case "reduce_scatter":  # every member gets parts and adds them, on GPUs in a ring of as many bytes
            return Move("all_to_all", group, sizes, mine * len(sizes), row_bytes)
        case "all_reduce":
            return Move(collective, group, (sum(sizes),), (sum(sizes),), row_bytes)
    return Move("", group, (), (), row_bytes)


@dataclass(frozen=True)
class TokenMoves:
    """Moves of tokens between ranks that share attention: every sample is cut alike."""

    even: StepCost

    def move(self, task: Task, rank: int) -> Move:
        """Return what one rank hands to the transport."""
        work, mesh = self.even.workload, self.even.workload.mesh
        assert task.microbatch is not None, task
        samples = split_sizes(work.batch, task.cut.microbatches)[task.microbatch]
        lengths = split_sizes(work.seq_len, work.tp_size)
        row_bytes = round(work.hidden_bytes(1))
        sizes = tuple(samples * length for length in lengths)
        if task.op == Op.PEAKS:  # every shard of the vocabulary sends those of all tokens
            sizes, row_bytes = (samples * work.seq_len,) * work.tp_size, tensor.PEAK_BYTES
        if task.op == Op.CHOICES:
            row_bytes = work.num_experts * tensor.COUNT_BYTES
            sizes = split_sizes(samples, work.tp_size)
        place = mesh.place(rank, task.axes)
        return within(self.even.work(task).collective, task.axes, sizes, place, row_bytes)


@dataclass(frozen=True)
class RowMoves:
    """Moves of rows on their way to experts and back, in whatever way they meet all shards of the experts.

    rows_PRCYE: rows that every rank brings for every expert. placement: where experts are.
    """

    even: StepCost
    rows_PRCYE: Counts
    placement: ExpertPlacement

    # ---- of one rank ---------------------------------------------------------------------------------------

    def move(self, task: Task, rank: int) -> Move:
        """Return what a rank hands to the transport."""
        row_bytes = round(self.row_bytes(task))
        if task.op not in TRANSFERS:
            sizes, place = self._sizes(task)[rank], self.even.workload.mesh.place(rank, task.axes)
            whole = tuple(map(int, sizes))
            return within(self.even.work(task).collective, task.axes, whole, place, row_bytes)
        leg = self._leg(task, rank)
        there, back = leg.input_splits, leg.output_splits
        sent, received = (there, back) if to_experts(task) else (back, there)
        return Move("all_to_all", leg.axes, sent, received, row_bytes)

    def row_bytes(self, task: Task) -> float:
        """Return the bytes of a row as the task moves it."""
        return self.even.row_bytes(outward=task.op in HOME)

    def exchanged_counts(self, task: Task, rank: int) -> tuple[Counts, Counts]:
        """Return what a COUNTS task sends and is to receive on one rank.

        Sent: [T, C, N]. Received: the same from every rank that is asked, [W, C, N]; where a rank must know
        what the others send to each other, everything that they send, [W, T, C, N].
        """
        assert task.microbatch is not None, task
        rows_PCE = self.rows_PRCYE[:, task.microbatch, :, self._moe_layer(task)]
        cut = [self._with_rows(self._by_target(rows_PCE[:, c], task)) for c in range(rows_PCE.shape[1])]
        group, place, shard = self._place(rank)
        tables_SHTCN = np.stack([table[group] for table in cut], axis=3)
        sent = tables_SHTCN[place, shard]
        if self.needs_table:
            whole = tables_SHTCN if task.axes == Group.EXPERT_SHARDS else tables_SHTCN[:, shard]
            return sent, whole.reshape(-1, *sent.shape)
        return sent, tables_SHTCN[:, shard, place]

    @property
    def needs_table(self) -> bool:
        """Whether every rank tells every other everything that it sends."""
        work, form = self.even.workload, self.even.shape.expert_form
        repeated = work.tp_size > 1 and form in ("s2", "baseline")
        return work.etp_size > 1 or repeated or (self._legs.needs_table and not self._legs.joins_rows)

    # ---- of all ranks --------------------------------------------------------------------------------------

    def received(self, task: Task) -> Counts:
        """Return rows that every rank's experts get, [P]: those of all shards, whichever rank brings them."""
        by_target = self._table(task).sum(axis=(1, 2, 4))
        return np.repeat(by_target.reshape(-1), self.even.workload.etp_size)

    def busier(self, task: Task) -> Rows:
        """Return rows over every rank's link in its busier direction, as argument of the collective, [P].

        With even routing the argument is the one in the op's `work`.
        """
        collective = self.even.work(task).collective
        if collective == "leg":
            if self._knows_nodes(task):
                return self._links.argument(self._ranks(task))
            share = self._share(task)
            argument: Rows = self._remote(task) * (1 / share if share else 0.0)
            return argument
        sizes_PW = self._sizes(task)
        total: Rows = sizes_PW.sum(axis=1).astype(np.float64)
        members = sizes_PW.shape[1]
        if collective == "all_reduce" or members == 1:
            return total
        mesh = self.even.workload.mesh
        places = np.array([mesh.place(rank, task.axes) for rank in range(len(sizes_PW))])
        mine = np.take_along_axis(sizes_PW, places[:, None], axis=1)[:, 0]
        busier: Rows = np.maximum((members - 1) * mine, total - mine) * members / (members - 1)
        return busier

    def _remote(self, task: Task) -> Rows:
        """Return rows to or from other ranks in this leg, whichever are more, [P]."""
        if not self._legs.needs_table and not self._fused(task):
            planes_GHST = self._planes(task)
            busier = np.maximum(planes_GHST.sum(axis=3), planes_GHST.sum(axis=2))
            away_GHS = busier - planes_GHST.diagonal(axis1=2, axis2=3)
            away: Rows = away_GHS.transpose(0, 2, 1).reshape(-1).astype(np.float64)
            return away
        return np.array([self._remote_of(task, rank) for rank in range(self.even.workload.world_size)])

    def crossing(self, task: Task) -> float:
        """Return the rows that leave their node, or their rank where there is one node."""
        return self._links.crossing(self._ranks(task))

    def _knows_nodes(self, task: Task) -> bool:
        """Return whether some rows of a flat transfer stay inside nodes, and so take other links."""
        flat = not self._legs.needs_table and not self._fused(task)
        span = self.even.workload.span(Group.EXPERT)
        return flat and span.nodes > 1 and span.most > 1

    def _ranks(self, task: Task) -> Rows:
        """Return rows from rank to rank of the world, [P, P]."""
        planes_GHST, mesh = self._planes(task), self.even.workload.mesh
        found = np.zeros((mesh.world_size, mesh.world_size))
        for ranks in mesh.groups(Group.EXPERT):
            group, _, shard = self._place(ranks[0])
            found[np.ix_(ranks, ranks)] = planes_GHST[group, shard]
        return found

    @property
    def _legs(self) -> Dispatch:
        return DISPATCHES[self.even.workload.dispatch]

    @cached_property
    def _links(self) -> NodeLinks:
        return NodeLinks(self.even.workload, self.even.cluster)

    def _remote_of(self, task: Task, rank: int) -> float:
        leg, (_, place, shard) = self._leg(task, rank), self._place(rank)
        if self._fused(task):
            own = place * self.even.workload.etp_size + shard
        else:
            own = place_in(leg.axes, self._dispatch_place(place))
        sent, received = sum(leg.input_splits), sum(leg.output_splits)
        return float(max(sent - leg.input_splits[own], received - leg.output_splits[own]))

    def _share(self, task: Task) -> float:
        """Return the part of an even leg's argument that goes over the busiest rank's link."""
        work = self.even.workload
        if self._fused(task):
            members = work.mesh.size(task.axes)
            return (members - 1) / members
        return even_leg(work.dispatch, task.op, work.nodes, work.ranks_per_node).share

    # ---- tables --------------------------------------------------------------------------------------------

    def _leg(self, task: Task, rank: int) -> Leg:
        """Return the leg of a task towards the experts."""
        group, place, shard = self._place(rank)
        if self._fused(task):
            table_SHT = self._table(task)[group].sum(axis=3)
            sent = tuple(int(n) for n in table_SHT[place, shard] for _ in range(table_SHT.shape[1]))
            return Leg(task.axes, (), (), sent, tuple(map(int, table_SHT[:, :, place].reshape(-1))))
        number = [hop.op for hop in self.even.shape.dispatch].index(outward(task.op))
        there = self._dispatch_place(place)
        if self._legs.joins_rows:
            nodes_GPN, ranks_GPP = self._joined(task)
            return joined_sizes(nodes_GPN[group], ranks_GPP[group], there)[number]
        return self._legs.legs(self._planes(task)[group, shard], there)[number]

    def _planes(self, task: Task) -> Counts:
        """Return rows from rank to rank that a leg between nodes carries for every shard, [G, H, S, T]."""
        if self._legs.joins_rows:
            return self._along_rails(task)
        if self.even.workload.one_copy_per_rank:
            return self._joined(task)[1][:, None]
        table_GSHT: Counts = self._table(task).sum(axis=4)
        if task.cut.row_copies > 1:  # rows are gathered before they leave
            table_GSHT = np.broadcast_to(table_GSHT.sum(axis=2, keepdims=True), table_GSHT.shape)
        return table_GSHT.transpose(0, 2, 1, 3)

    def _joined(self, task: Task) -> tuple[Counts, Counts]:
        """Return joined rows of every rank for every node, [G, S, nodes], and for every rank, [G, S, T]."""
        work, key = self.even.workload, (task.microbatch, task.cut.held, task.layer, task.op in HOME)
        if key not in self._known_joined:
            table_GSTN = self._table(task)[:, :, 0]
            groups, ranks = table_GSTN.shape[:2]
            found = []
            for parts in (work.nodes, ranks):
                inputs = table_GSTN.reshape(groups * ranks, parts, -1)
                near = work.nearness(parts)
                found.append(distinct_rows(inputs, work.top_k, near).reshape(groups, ranks, parts))
            self._known_joined[key] = found[0], found[1]
        return self._known_joined[key]

    @cached_property
    def _known_joined(self) -> dict[object, tuple[Counts, Counts]]:
        return {}

    def _with_rows(self, table_GSHTN: Counts) -> Counts:
        """Append room for the numbers of joined rows, of any value, to the inputs of experts."""
        work = self.even.workload
        if not work.joins_rows:
            return table_GSHTN
        kinds = num_sets(work.ranks_per_node) if self._legs.joins_rows else 1
        return np.concatenate([table_GSHTN, np.zeros((*table_GSHTN.shape[:4], kinds), np.int64)], axis=4)

    def _along_rails(self, task: Task) -> Counts:
        """Return rows from rank to rank of the same place in its node, [G, 1, S, T]."""
        nodes_GPN, size = self._joined(task)[0], self.even.workload.ranks_per_node
        groups, ranks, nodes = nodes_GPN.shape
        found = np.zeros((groups, ranks, nodes, size), dtype=np.int64)
        for rank in range(ranks):
            found[:, rank, :, place_in_node(rank, size)] = nodes_GPN[:, rank]
        return found.reshape(groups, 1, ranks, ranks)

    def _sizes(self, task: Task) -> Counts:
        """Return the rows of every member of a task's group, by rank, [P, W]."""
        return self._sizes_by_op[task.op](task)

    @cached_property
    def _sizes_by_op(self) -> Mapping[str, SizesOf]:
        after = dict.fromkeys((Op.SHARD_GATHER, Op.SHARD_SCATTER, Op.ROWS_REDUCE), self._brought)
        before = dict.fromkeys((Op.ROWS_GATHER, Op.ROWS_KEEP), self._leaving)
        return {**after, **before, **dict.fromkeys((Op.DEAL_SLOTS, Op.GATHER_SLOTS), self._turns)}

    def _brought(self, task: Task) -> Counts:
        """Return the rows that came to a rank's experts by way of each of their shards."""
        return self._by_shard(self._table(task).sum(axis=(1, 4)).transpose(0, 2, 1))

    def _leaving(self, task: Task) -> Counts:
        """Return the rows that each of the ranks that share a rank's experts sends."""
        return self._by_shard(self._table(task).sum(axis=(3, 4)))

    def _by_shard(self, sizes_GPH: Counts) -> Counts:
        shards = sizes_GPH.shape[2]
        return np.repeat(sizes_GPH.reshape(-1, shards), shards, axis=0)

    def _turns(self, task: Task) -> Counts:
        """Return the rows that each of the ranks with the same rows is dealt."""
        shares = self.even.workload.tp_size
        rows_PCE = self._held(self.rows_PRCYE, task)
        return np.stack([in_turn(rows_PCE, i, shares).sum(axis=(1, 2)) for i in range(shares)], axis=1)

    def _table(self, task: Task) -> Counts:
        """Return rows of the task's microbatch and chunk as they travel, [G, S, H, T, N].

        The last table is kept: a leg's price asks for it rank by rank.
        """
        key = task.microbatch, task.cut.held, task.layer, outward(task.op) == task.op
        if key not in self._last_table:
            self._last_table.clear()
            rows_PE = self._held(self._travelling(task), task).sum(axis=1)
            self._last_table[key] = self._by_target(rows_PE, task)
        return self._last_table[key]

    @cached_property
    def _last_table(self) -> dict[object, Counts]:
        return {}

    def _travelling(self, task: Task) -> Counts:
        """Return the rows that every rank sends for every expert, or gets back, [P, R, C, Y, E]."""
        del task  # rows come home to where they started
        return self._dealt

    def _by_target(self, rows_PE: Counts, task: Task) -> Counts:
        del task  # experts of all layers are placed alike
        return by_source_and_target(rows_PE, self.placement, self.even.workload.etp_size)

    @cached_property
    def _dealt(self) -> Counts:
        return dealt(self.rows_PRCYE, self.even.shape, self.even.workload)

    def _held(self, rows_PRCYE: Counts, task: Task) -> Counts:
        """Return the rows of the slices that a task has, [P, C, E]."""
        assert task.microbatch is not None and task.chunk is not None, task
        held = task.cut.held
        rows: Counts = rows_PRCYE[:, task.microbatch, held.start : held.stop, self._moe_layer(task)]
        return rows

    # ---- places --------------------------------------------------------------------------------------------

    @staticmethod
    def _fused(task: Task) -> bool:
        """Return whether a row goes to every shard of its expert at once."""
        return task.axes == Group.EXPERT_SHARDS

    def _place(self, rank: int) -> tuple[int, int, int]:
        """Return a rank's group of ranks that hold all experts, its place there, and its shard."""
        mesh = self.even.workload.mesh
        group = mesh.group(rank, Group.EXPERT_SHARDS)
        return group, mesh.place(rank, Group.EXPERT), mesh.place(rank, Group.SHARDS)

    def _dispatch_place(self, place: int) -> Place:
        work = self.even.workload
        return Place(place, work.ep_size, work.ranks_per_node)

    def _moe_layer(self, task: Task) -> int:
        """Return the number of the task's layer among MoE layers."""
        return sum(self.even.shape.moe_layers[: task.layer])


def to_experts(task: Task) -> bool:
    """Return whether data goes to the experts: rows in dispatch, or in backward gradients in combine."""
    return (task.op in HOME) is task.forward
