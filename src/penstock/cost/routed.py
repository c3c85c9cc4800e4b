"""Cost of a step on every rank when tokens are not spread evenly. No torch: the simulator reads it, too.

Shapes: those of `penstock.routing.rows`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from penstock.apportion import Counts
from penstock.cost.cluster import ClusterConfig
from penstock.cost.moves import FOLLOWING, ROW_MOVES, RowMoves
from penstock.cost.step import StepCost
from penstock.cost.workload import Workload
from penstock.features.table import ROUTED
from penstock.graph import Name, Task
from penstock.mesh import Group, Seconds
from penstock.ops import spec_of
from penstock.ops.core import between_nodes, computes_experts
from penstock.routing.rows import Placed
from penstock.step import StepShape
from penstock.workloads import RoutingSizes


def routing_sizes(work: Workload, moe_layers: int) -> RoutingSizes:
    """Return the batch of all ranks, as a workload routes it."""
    return RoutingSizes(
        groups=work.mesh.size(Group.DATA),
        samples=work.batch,
        seq_len=work.seq_len,
        moe_layers=moe_layers,
        num_experts=work.num_experts,
        top_k=work.top_k,
        holders=work.ep_size,
    )


@dataclass(frozen=True)
class RoutedCost:
    """`cost(task)` in seconds, an array [ranks]: `StepCost`, but experts and transfers follow the routing.

    Of a sample of the step (see `Evidence`) the known ranks alone are priced, and once all layers that one
    stands for: O(layers known x ranks known x (ranks of an expert group + experts)) numbers.

    Attributes:
        counts_DBYE: The token copies of every sample for every expert, as `Routing.counts` gives them.
        placed: The places of samples and replicas; None = nothing moves.
        columns: The layer of the counts for every MoE layer, see `Evidence.columns`.
    """

    shape: StepShape
    workload: Workload
    cluster: ClusterConfig
    counts_DBYE: Counts
    placed: Placed | None = None
    columns: tuple[int, ...] = ()
    _known: dict[Name, Seconds] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Seconds of tasks that follow rows, by name, with the layer of the counts."""

    def __call__(self, task: Task) -> Seconds:
        """Return seconds on every rank, [P]; of a transfer without the time to wait for partners."""
        if not (self.columns and (task.op in FOLLOWING or computes_experts(task.op))):
            return self.seconds(task) if task.lane.computes else self.transfer_s(task)
        kind = self._alike(task)
        if kind not in self._known:
            self._known[kind] = self.seconds(task) if task.lane.computes else self.transfer_s(task)
        return self._known[kind]

    def _alike(self, task: Task) -> Name:
        """Return what a task that follows rows has in common with those of layers that are routed alike."""
        return task.name._replace(layer=self.moves.column(task))

    def seconds(self, task: Task) -> Seconds:
        """Return seconds of a compute task on every rank, [P]."""
        if not computes_experts(task.op):
            return self._everywhere(self.even.compute_s(task))
        even_rows = self.even.rows(task) * task.cut.row_copies
        return self.even.loaded_s(task, self.moves.received(task).astype(np.float64) / max(even_rows, 1))

    def transfer_s(self, task: Task) -> Seconds:
        """Return seconds of a communication task on every rank, [P], by its busier direction."""
        work, routed, spec = self.even.work(task), ROUTED.get(task.op), spec_of(task.op)
        if self.placed is not None and routed is not None:
            if routed.load is not None:
                return self._by_load(task, routed.load(self.moves, task))
            if routed.seconds is not None:
                seconds = self.even.communication_s(task)
                return self._everywhere(routed.seconds(self.moves, task, seconds))
        if spec.sizes_transfers and self.moves.splits(task):
            members = float(self.workload.mesh.size(task.axes))  # every rank gets what all others have
            return self._everywhere(self.even.scaled_s(task, members))
        if task.op not in ROW_MOVES or not work.sent_bytes:
            return self._everywhere(self.even.communication_s(task))
        # The model's argument is a rank's bytes for all experts under even routing.
        load = self.moves.row_bytes(task) * self.moves.busier(task) / work.sent_bytes
        return self._by_load(task, load)

    def _by_load(self, task: Task, load: Seconds) -> Seconds:
        """Return seconds of a transfer on every rank, [P], that carries `load` times its usual bytes."""
        loads, where = np.unique(load, return_inverse=True)
        seconds = np.array([self.even.scaled_s(task, each) for each in loads.tolist()])
        return seconds[where]

    def solo_s(self, tasks: Iterable[Task]) -> Seconds:
        """Return the seconds of a step's computation on every rank if nothing is ever waited for, [P]."""
        compute = [self.seconds(task) for task in tasks if task.lane.computes]
        total: Seconds = np.stack(compute).sum(axis=0)
        return total

    def crossing_rows(self, tasks: Iterable[Task]) -> float:
        """Return rows that leave their node in the forward pass, or their rank where there is one node."""
        crossing = {op for op, routed in ROUTED.items() if routed.crossing}
        there = [t for t in tasks if t.forward and (between_nodes(t.op) or t.op in crossing)]
        by_kind: dict[Name, float] = {}
        for task in there:
            if (kind := self._alike(task)) not in by_kind:
                by_kind[kind] = self.moves.crossing(task)
        return sum(by_kind[self._alike(task)] for task in there)

    def imbalance(self, tasks: Iterable[Task]) -> float:
        """Return the rows of the busiest rank's experts over the mean, in the layer where that is largest."""
        rows = self._expert_rows(tasks)
        return max((float(each.max() / max(1.0, each.mean())) for each in rows), default=1.0)

    def load_spread(self, tasks: Iterable[Task]) -> float:
        """Return the standard deviation of ranks' rows over their mean, averaged over layers."""
        rows = self._expert_rows(tasks)
        return sum(float(each.std() / max(1.0, each.mean())) for each in rows) / max(1, len(rows))

    def _expert_rows(self, tasks: Iterable[Task]) -> list[Seconds]:
        """Return rows that every rank's experts get in a step, by layer, [P] each."""
        rows: dict[int, Seconds] = defaultdict(lambda: self._everywhere(0.0))
        by_kind: dict[Name, Counts] = {}
        for task in tasks:
            if task.forward and computes_experts(task.op):
                if (kind := self._alike(task)) not in by_kind:
                    by_kind[kind] = self.moves.received(task)
                rows[task.layer] += by_kind[kind]
        return list(rows.values())

    @cached_property
    def rows(self) -> Counts:
        """Rows that every rank brings for every expert, see `BatchCut.rows`."""
        counts_DBYE = self.counts_DBYE if self.placed is None else self.placed.leaving(self.counts_DBYE)
        return self.part.cut(self.shape).rows(counts_DBYE)

    @cached_property
    def part(self) -> Workload:
        """The workload with the ranks alone that are priced."""
        return self.workload.part(len(self.counts_DBYE))

    @cached_property
    def moves(self) -> RowMoves:
        """What tasks hand to the transport on every rank."""
        even = StepCost(self.shape, self.part, self.cluster)
        placed, arriving = self.placed, None
        if placed is not None:
            arriving = self.part.cut(self.shape).rows(placed.arriving(self.counts_DBYE))
        return RowMoves(even, self.rows, columns=self.columns, places=placed, arriving_PRCYE=arriving)

    @cached_property
    def even(self) -> StepCost:
        """The cost with even routing."""
        return StepCost(self.shape, self.workload, self.cluster)

    def _everywhere(self, seconds: float) -> Seconds:
        return np.full(self.part.world_size, seconds)
