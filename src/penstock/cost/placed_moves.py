"""Data in transit in a step whose samples and experts move: other rows go home than left. No torch.

Shapes: those of `penstock.cost.placed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from penstock.apportion import Counts
from penstock.cost.moves import Move, RowMoves, Rows
from penstock.cost.placed import FLOAT32_BYTES, Placed, device_groups, row_weight
from penstock.features.expert_replicas.encoding import told_bytes
from penstock.features.expert_replicas.model import copies_of
from penstock.features.sample_placement.ops import COUNT_BYTES
from penstock.graph import Task
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.ops.transfers import outward
from penstock.ops.work import DIGEST_BYTES
from penstock.routing.replicas import rows_by_position
from penstock.routing.sizes import part_sizes, split_sizes

PLACED_MOVES: Final = (Op.REPLICA_PARAMETERS, Op.REPLICA_GRADIENTS, Op.SAMPLE_MOVE, Op.COMPARE_REPLICAS)
"""Ops that move what follows samples and experts: their bytes are proportional to the number that moves."""
PLACEMENT_MOVES: Final = (*PLACED_MOVES, Op.SAMPLE_LOADS, Op.SAMPLE_HOMES)
"""All ops of placement: those of PLACED_MOVES, and those by which ranks tell each other of samples."""
INTEGER_BYTES: Final = 8
SOLVING_S, SOLVING_S_PER_CELL = 1e-3, 3e-7
"""Seconds to find new homes, fixed and per cell (see `solving_s`): twice what a 2 GHz core needs."""


@dataclass(frozen=True)
class PlacedMoves(RowMoves):
    """Moves of rows that leave from where samples were and come home to where they are next; with replicas.

    rows_PRCYE: of the samples that leave. arriving_PRCYE: of those to which rows come home.
    """

    arriving_PRCYE: Counts
    placed: Placed

    def move(self, task: Task, rank: int) -> Move:
        """Return what a rank hands to the transport."""
        match task.op:
            case Op.SAMPLE_LOADS:  # every sample's rows by position, and those expected in the next layer
                experts, replications = self.even.workload.num_experts, self.placed.replications
                here = replications[self.column(task)].positions if replications else experts
                last = self._moe_layer(task) + 1 == sum(self.even.shape.moe_layers)
                row_bytes = COUNT_BYTES * (here + (0 if last else experts))
                return self._gathered(task, rank, len(self._samples(task)), row_bytes)
            case Op.SAMPLE_HOMES:  # hashes of the homes that every rank has found
                return self._gathered(task, rank, 1, DIGEST_BYTES)
            case Op.COMPARE_REPLICAS:  # every rank's share of the planned replications
                share_bytes = round(self._told_bytes(task) / len(self._members(task, rank)))
                return self._gathered(task, rank, 1, share_bytes)
            case Op.SAMPLE_MOVE:  # what follows a sample beside its rows: labels and so on; gradients back
                samples = self._samples(task)
                moved_DD = self.placed.moved(self.column(task), samples.start, samples.stop)
                return self._exchanged(task, rank, moved_DD, Group.DATA, self._sample_bytes(task, rank))
            case Op.REPLICA_PARAMETERS | Op.REPLICA_GRADIENTS:
                # A piece of every replica's parameters to its rank, or of gradients to its owner.
                assert task.piece is not None, task
                elements = round(self.even.workload.expert_bytes) // FLOAT32_BYTES
                piece_bytes = part_sizes(elements, task.cut.parts)[task.piece] * FLOAT32_BYTES
                sent = copies_of(self.placed.replications[self.column(task)])
                return self._exchanged(task, rank, sent, Group.EXPERT, piece_bytes)
        return super().move(task, rank)

    def load(self, task: Task) -> Rows:
        """Return the load of a transfer over that of its work, by the links of every rank, [P]."""
        if task.op == Op.COMPARE_REPLICAS:
            told = self._told_bytes(task) / self.even.work(task).sent_bytes
            return np.full(self.even.workload.world_size, told)
        if task.op == Op.SAMPLE_MOVE:
            assumed_bytes, sample_bytes = self.even.work(task).sent_bytes, self._sample_bytes(task, 0)
            load: Rows = self._links.argument(self._moved(task)) * sample_bytes / max(assumed_bytes, 1)
            return load
        mesh, sent = self.even.workload.mesh, np.zeros((self.even.workload.world_size,) * 2)
        if self.placed.replications:
            here = copies_of(self.placed.replications[self.column(task)])
            for ranks in mesh.groups(Group.EXPERT):
                sent[np.ix_(ranks, ranks)] = here if task.forward else here.T
        return self._links.argument(sent) / self.even.shape.replica_slots  # the task's work fills every slot

    def solving_s(self, task: Task) -> float:
        """Return the seconds until the new homes of a microbatch are found, by all ranks alike."""
        work, samples = self.even.workload, len(self._samples(task))
        groups = device_groups(work)
        solved = len(groups) // len(work.mesh.groups(work.mesh.all_experts))  # of those that a rank knows of
        return SOLVING_S + SOLVING_S_PER_CELL * samples * solved * len(groups[0].devices) ** 2

    def crossing(self, task: Task) -> float:
        """Return rows that leave their node, or rank where there is one node, and what moves with them."""
        if task.op != Op.SAMPLE_MOVE:
            return super().crossing(task)
        work, weight = self.even.workload, row_weight(self.even.workload, self.even.shape)
        return self._links.crossing(self._moved(task)) * work.seq_len * weight / work.tp_size

    def _moved(self, task: Task) -> Rows:
        """Return samples from rank to rank, [P, P]; ranks that share them each move a part of the tokens."""
        mesh, places = self.even.workload.mesh, self._samples(task)
        moved_DD = self.placed.moved(self.column(task), places.start, places.stop)
        found = np.zeros((mesh.world_size, mesh.world_size))
        for ranks in zip(*mesh.groups(Group.TENSOR), strict=True):
            found[np.ix_(ranks, ranks)] = moved_DD if task.forward else moved_DD.T
        return found

    def _samples(self, task: Task) -> range:
        """Return the places in a group's batch of a task's microbatch."""
        assert task.microbatch is not None, task
        sizes = split_sizes(self.even.workload.batch, task.cut.microbatches)
        first = sum(sizes[: task.microbatch])
        return range(first, first + sizes[task.microbatch])

    def _travelling(self, task: Task) -> Counts:
        return self._dealt if outward(task.op) == task.op else self.arriving_PRCYE

    def exchanged_counts(self, task: Task, rank: int) -> tuple[Counts, Counts]:
        """Return what a COUNTS task sends and is to receive on one rank, as in any step.

        Where rows are split by the loads of the step itself, it receives all ranks' rows by expert, [W, C,
        E].
        """
        if not self.splits(task):
            return super().exchanged_counts(task, rank)
        rows_PCE = self.rows_PRCYE[:, task.microbatch, :, self.column(task)]
        return rows_PCE[rank], rows_PCE[list(self._members(task, rank))]

    def splits(self, task: Task) -> bool:
        """Return whether rows of the task's layer are split by the loads of the step."""
        replications = self.placed.replications
        return bool(replications) and replications[self.column(task)].limit is not None

    def _table(self, task: Task) -> Counts:
        if not self.placed.replications:
            return super()._table(task)
        key = task.microbatch, task.cut.held, self.column(task), outward(task.op) == task.op
        if key not in self._known_tables:  # every slice is split by itself, as ranks tell each other
            stay = self.splits(task)  # then no samples move
            rows_PCE = self._held(self.rows_PRCYE if stay else self._travelling(task), task)
            slices = [self._by_target(rows_PCE[:, c], task) for c in range(rows_PCE.shape[1])]
            self._known_tables[key] = np.sum(slices, axis=0)
        return self._known_tables[key]

    @cached_property
    def _known_tables(self) -> dict[object, Counts]:
        return {}

    def _by_target(self, rows_PE: Counts, task: Task) -> Counts:
        if not self.placed.replications:
            return super()._by_target(rows_PE, task)
        replication, work = self.placed.replications[self.column(task)], self.even.workload
        rows_PH = rows_by_position(rows_PE, replication, work.mesh)
        ranks = replication.placement.ranks
        return rows_PH.reshape(-1, ranks, work.etp_size, ranks, replication.slots)

    # ---- of one rank, beside the rows ----------------------------------------------------------------------

    def _told_bytes(self, task: Task) -> int:
        """Return bytes that all ranks exchange about replicas, as if the next step had those of this one."""
        members = self.even.workload.mesh.size(task.axes)
        known = [told_bytes(each) for each in self.placed.replications]
        return 2 * DIGEST_BYTES * members + sum(known[column] for column in self.columns or range(len(known)))

    def _gathered(self, task: Task, rank: int, rows: int, row_bytes: int) -> Move:
        members = len(self._members(task, rank))
        return Move("all_gather", task.axes, (rows,), (rows,) * members, row_bytes)

    def _exchanged(self, task: Task, rank: int, sent: Counts, along: Axes, row_bytes: int) -> Move:
        """Return the move of an exchange between places along these axes.

        sent: forward, from place to place; what stays is not handed over.
        """
        mesh, table = self.even.workload.mesh, sent if task.forward else sent.T
        mine = mesh.place(rank, along)
        places = [mesh.place(member, along) for member in self._members(task, rank)]
        there, back = (
            tuple(0 if place == mine else int(row[place]) for place in places)
            for row in (table[mine], table[:, mine])
        )
        return Move("all_to_all", task.axes, there, back, row_bytes)

    def _sample_bytes(self, task: Task, rank: int) -> int:
        """Return bytes that follow a sample from this rank, which may have a part of its tokens only."""
        work = self.even.workload
        tokens = split_sizes(work.seq_len, work.tp_size)[work.mesh.place(rank, Group.TENSOR)]
        apart = not self.even.shape.packed_residual
        streams = apart + (work.shared_ffn_hidden_size > 0)
        values_bytes = (streams * work.hidden_size + apart * work.top_k) * FLOAT32_BYTES
        if not task.forward:
            return tokens * values_bytes
        return tokens * (values_bytes + (work.top_k + 1) * INTEGER_BYTES) + INTEGER_BYTES

    def _members(self, task: Task, rank: int) -> Sequence[int]:
        return self.even.workload.mesh.members(rank, task.axes)
