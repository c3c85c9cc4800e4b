"""What is under way in a step whose samples and experts move: other rows go home than left. No torch.

Shapes: those of `penstock.cost.placed`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.cost.moves import RowMoves, Rows
from penstock.cost.placed import Placed, copies, device_groups, row_weight, seated
from penstock.cost.workload import split_sizes
from penstock.graph import Task
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.transfers import outward
from penstock.workloads import Counts

PLACED_MOVES = (Op.GUEST_PARAMETERS, Op.GUEST_GRADIENTS, Op.SAMPLE_MOVE)
SOLVING_S, SOLVING_S_PER_CELL = 1e-3, 3e-7
"""What finding new homes takes, per sample and device beside a fixed part: twice what a 2 GHz core needs."""


@dataclass(frozen=True)
class PlacedMoves(RowMoves):
    """Rows leave from where samples were, and come home to where they are next. Guests take rows of others.

    rows_PRCYE: of the samples that leave. arriving_PRCYE: of those to which rows come home.
    """

    arriving_PRCYE: Counts
    placed: Placed

    def load(self, task: Task) -> Rows:
        """How many times as much as its work says a transfer takes, by the links of every rank, [P]."""
        return self._sample_load(task) if task.op == Op.SAMPLE_MOVE else self._guest_load(task)

    def solving_s(self, task: Task) -> float:
        """Seconds until the new homes of a microbatch are found, by all ranks alike."""
        devices = len(device_groups(self.even.workload)[0])
        samples = len(self._samples(task))
        return SOLVING_S + SOLVING_S_PER_CELL * samples * devices**2

    def crossing(self, task: Task) -> float:
        """Rows that leave their node, or their rank where there is one node, and what moves beside them."""
        if task.op != Op.SAMPLE_MOVE:
            return super().crossing(task)
        work = self.even.workload
        return self._links.crossing(self._moved(task)) * work.seq_len * row_weight(work) / work.mp_size

    def _guest_load(self, task: Task) -> Rows:
        mesh, sent = self.even.workload.mesh, np.zeros((self.even.workload.world_size,) * 2)
        if self.placed.hostings:
            here = copies(self.placed.hostings[self._moe_layer(task)])
            for ranks in mesh.groups(Group.EXPERT):
                sent[np.ix_(ranks, ranks)] = here if task.forward else here.T
        return self._links.argument(sent)

    def _sample_load(self, task: Task) -> Rows:
        work = self.even.workload
        sample_bytes = work.seq_len * row_weight(work) * work.wire_bytes(1) / work.mp_size
        assumed_bytes = self.even.work(task).sent_bytes
        load: Rows = self._links.argument(self._moved(task)) * sample_bytes / max(assumed_bytes, 1)
        return load

    def _moved(self, task: Task) -> Rows:
        """Samples from rank to rank, each of those that share them with its part of the tokens, [P, P]."""
        mesh, places = self.even.workload.mesh, self._samples(task)
        moved_DD = self.placed.moved(self._moe_layer(task), places.start, places.stop)
        found = np.zeros((mesh.world_size, mesh.world_size))
        for ranks in zip(*mesh.groups(Group.TENSOR), strict=True):
            found[np.ix_(ranks, ranks)] = moved_DD if task.forward else moved_DD.T
        return found

    def _samples(self, task: Task) -> range:
        """The places in a group's batch that a task's microbatch has."""
        assert task.microbatch is not None, task
        sizes = split_sizes(self.even.workload.batch, task.cut.microbatches)
        first = sum(sizes[: task.microbatch])
        return range(first, first + sizes[task.microbatch])

    def _travelling(self, task: Task) -> Counts:
        return self._dealt if outward(task.op) == task.op else self.arriving_PRCYE

    def _by_target(self, rows_PE: Counts, task: Task) -> Counts:
        if not self.placed.hostings:
            return super()._by_target(rows_PE, task)
        hosting, work = self.placed.hostings[self._moe_layer(task)], self.even.workload
        rows_PH = seated(rows_PE, hosting, work)
        ranks = hosting.placement.ranks
        return rows_PH.reshape(-1, ranks, work.esp_size, ranks, hosting.slots)
