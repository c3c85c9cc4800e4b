"""What ranks send so that samples and experts can move, in sizes: all but the rows themselves. No torch.

Shapes: those of `penstock.cost.placed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.cost import RoutedCost
from penstock.cost.moves import Move
from penstock.cost.placed import FLOAT32_BYTES, Placed, copies
from penstock.cost.workload import part_sizes, split_sizes
from penstock.graph import Task
from penstock.mesh import Group, Mesh
from penstock.ops import Op
from penstock.ops.samples import COUNT_BYTES, DIGEST_BYTES
from penstock.workloads import Counts

INTEGER_BYTES = 8


@dataclass(frozen=True)
class PlacementMoves:
    """The moves of one step on one rank. placed: where everything is."""

    cost: RoutedCost
    placed: Placed
    rank: int

    def of(self, task: Task) -> Move:
        """What the task hands to the transport."""
        return _MOVES[task.op](self, task)

    def counts(self, task: Task) -> Move:
        """Every sample's rows by position, and what it is expected to want of the next layer."""
        work, samples = self.cost.workload, self._samples(task)
        layer, hostings = self._moe_layer(task), self.placed.hostings
        here = hostings[layer].positions if hostings else work.num_experts
        last = layer + 1 == sum(self.cost.shape.moe_layers)
        row_bytes = COUNT_BYTES * (here + (0 if last else work.num_experts))
        return self._gathered(task, len(samples), row_bytes)

    def hashes(self, task: Task) -> Move:
        """Of what everybody has found."""
        return self._gathered(task, 1, DIGEST_BYTES)

    def samples(self, task: Task) -> Move:
        """What follows a sample: its residual, gate weights, labels and so on; their gradients back."""
        samples = self._samples(task)
        moved_DD = self.placed.moved(self._moe_layer(task), samples.start, samples.stop)
        places = [self._mesh.place(member, Group.DATA) for member in self._members(task)]
        mine = self._mesh.place(self.rank, Group.DATA)
        return self._exchanged(task, moved_DD, places, mine, self._sample_bytes(task))

    def guests(self, task: Task) -> Move:
        """A piece of every guest's parameters to its host, or of its gradients to its owner."""
        assert task.piece is not None, task
        elements = round(self.cost.workload.expert_bytes) // FLOAT32_BYTES
        piece_bytes = part_sizes(elements, task.cut.parts)[task.piece] * FLOAT32_BYTES
        sent = copies(self.placed.hostings[self._moe_layer(task)])
        members = self._members(task)
        places = [self._mesh.place(member, Group.EXPERT) for member in members]
        mine = self._mesh.place(self.rank, Group.EXPERT)
        return self._exchanged(task, sent, places, mine, piece_bytes)

    def _gathered(self, task: Task, rows: int, row_bytes: int) -> Move:
        members = len(self._members(task))
        return Move("all_gather", task.axes, (rows,), (rows,) * members, row_bytes)

    def _exchanged(self, task: Task, sent: Counts, places: list[int], mine: int, row_bytes: int) -> Move:
        """sent: forward, from place to place; what stays is not handed over."""
        table = sent if task.forward else sent.T
        there, back = (
            tuple(0 if place == mine else int(n) for place, n in zip(places, row[places], strict=True))
            for row in (table[mine], table[:, mine])
        )
        return Move("all_to_all", task.axes, there, back, row_bytes)

    def _sample_bytes(self, task: Task) -> int:
        work = self.cost.workload
        tokens = split_sizes(work.seq_len, work.mp_size)[self._mesh.place(self.rank, Group.TENSOR)]
        streams = 2 if work.shared_ffn_hidden_size else 1
        values = (streams * work.hidden_size + work.top_k) * FLOAT32_BYTES
        if not task.forward:
            return tokens * values
        return tokens * (values + (work.top_k + 1) * INTEGER_BYTES) + INTEGER_BYTES

    def _samples(self, task: Task) -> range:
        """A rank's samples in the task's microbatch."""
        assert task.microbatch is not None, task
        sizes = split_sizes(self.cost.workload.batch, task.cut.microbatches)
        first = sum(sizes[: task.microbatch])
        return range(first, first + sizes[task.microbatch])

    def _members(self, task: Task) -> list[int]:
        return list(self._mesh.members(self.rank, task.axes))

    @property
    def _mesh(self) -> Mesh:
        return self.cost.workload.mesh

    def _moe_layer(self, task: Task) -> int:
        return sum(self.cost.shape.moe_layers[: task.layer])


_MOVES: Final[dict[str, Callable[[PlacementMoves, Task], Move]]] = {
    Op.SAMPLE_LOADS: PlacementMoves.counts,
    Op.SAMPLE_HOMES: PlacementMoves.hashes,
    Op.SAMPLE_MOVE: PlacementMoves.samples,
    Op.GUEST_PARAMETERS: PlacementMoves.guests,
    Op.GUEST_GRADIENTS: PlacementMoves.guests,
    Op.COMPARE_GUESTS: PlacementMoves.hashes,
}
PLACEMENT_MOVES: Final = tuple(_MOVES)
"""Ops of which it knows the sizes."""
