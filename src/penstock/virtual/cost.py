"""What a step costs on every rank when tokens are not spread evenly. No torch: the simulator reads it too.

Shapes: P ranks, E experts, and those of `penstock.virtual.rows`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.cost import ClusterConfig, StepCost, Workload
from penstock.cost.legs import even_leg
from penstock.dispatch import DISPATCHES, Leg, Place
from penstock.dispatch.base import place_in
from penstock.graph import Task
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.ops.transfers import HOME, TRANSFERS, outward
from penstock.placement import ExpertPlacement
from penstock.step import StepShape
from penstock.virtual.apportion import Counts
from penstock.virtual.rows import by_source_and_target, cut_rows

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Move:
    """One leg of one rank: rows to and from every member of a group."""

    group: Axes
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]


@dataclass(frozen=True)
class VirtualCost:
    """`cost(task)` in seconds, an array [ranks]: `StepCost`, but experts and transfers follow the routing.

    counts_PBYE: token copies of every sample for every expert, as `Routing.counts` gives them. placement:
    where experts are; None = the workload's.
    """

    shape: StepShape
    workload: Workload
    cluster: ClusterConfig
    counts_PBYE: Counts
    placement: ExpertPlacement | None = None

    def __call__(self, task: Task) -> Seconds:
        """Seconds on every rank, [P]; of a transfer without the time to wait for partners."""
        return self.seconds(task) if task.lane.computes else self.transfer_s(task)

    def seconds(self, task: Task) -> Seconds:
        """Seconds of a compute task on every rank, [P]."""
        even_s = self._even.compute_s(task)
        if task.op != Op.EXPERTS:
            return self._everywhere(even_s)
        # What experts compute and copy is in proportion to their rows; the overhead is not.
        overhead_s = self.cluster.task_overhead_s
        share = self._received(task).astype(np.float64) / max(self._even_rows(task), 1)
        return overhead_s + (even_s - overhead_s) * share

    def transfer_s(self, task: Task) -> Seconds:
        """Seconds of a communication task on every rank, [P], by its busier direction."""
        if task.op not in TRANSFERS:
            return self._everywhere(self._even.communication_s(task))
        work = self.workload
        link = self.cluster.leg(work.dispatch, task.op, work.span(Group.EXPERT))
        # The model's argument is what a rank has for all experts if routing is even.
        share = even_leg(work.dispatch, task.op, work.nodes, work.ranks_per_node).share
        rows = self._remote(task) / share if share else self._remote(task) * 0.0
        return np.array([link.seconds(work.wire_bytes(row)) for row in rows.tolist()])

    def reduced_bytes(self, task: Task) -> int:
        """Bytes of gradients in one piece of an all-reduce."""
        return self._even.reduced_bytes(task)

    def alone_s(self, tasks: Iterable[Task]) -> Seconds:
        """What the computation of a step takes on every rank if nothing is ever waited for, [P]."""
        compute = [self.seconds(task) for task in tasks if task.lane.computes]
        total: Seconds = np.stack(compute).sum(axis=0)
        return total

    def move(self, task: Task, rank: int) -> Move:
        """What a leg hands to the transport on one rank."""
        group, place = self._in_group(rank)
        table = self._table(self._piece(task))[group].sum(axis=2)
        leg = self._legs(table, place)[self._number(task)]
        there = Move(leg.axes, leg.input_splits, leg.output_splits)
        return there if self._to_experts(task) else Move(leg.axes, leg.output_splits, leg.input_splits)

    def exchanged_counts(self, task: Task, rank: int) -> tuple[Counts, Counts]:
        """What a COUNTS task sends and receives on one rank, both [peers, slices, local experts]."""
        assert task.op == Op.COUNTS and task.microbatch is not None, task
        group, place = self._in_group(rank)
        layer, rows = self._moe_layer(task), self.rows[:, task.microbatch]
        tables = np.stack([self._table(rows[:, c, layer]) for c in range(self.shape.slices)], axis=3)
        return tables[group, place], tables[group, :, place]

    @cached_property
    def rows(self) -> Counts:
        """Rows that every rank sends to every expert, [ranks, microbatches, slices, MoE layers, experts]."""
        return cut_rows(self.counts_PBYE, self.shape, self.workload)

    @cached_property
    def _even(self) -> StepCost:
        return StepCost(self.shape, self.workload, self.cluster)

    def _even_rows(self, task: Task) -> float:
        """Rows that every rank's experts would get if routing were even."""
        assert task.microbatch is not None and task.chunk is not None, task
        cut = task.cut
        return sum(self.workload.rows(task.microbatch, cut.microbatches, s, cut.slices) for s in cut.held)

    def _received(self, task: Task) -> Counts:
        """Rows that every rank's experts get, [P]."""
        received: Counts = self._table(self._piece(task)).sum(axis=(1, 3)).reshape(-1)
        return received

    def _remote(self, task: Task) -> Seconds:
        """Rows over every rank's link in its busier direction in this leg, [P]."""
        work, number = self.workload, self._number(task)
        by_pair = self._table(self._piece(task)).sum(axis=3)
        if not DISPATCHES[work.dispatch].needs_table:
            busier = np.maximum(by_pair.sum(axis=2), by_pair.sum(axis=1))
            direct: Seconds = (busier - by_pair.diagonal(axis1=1, axis2=2)).reshape(-1).astype(np.float64)
            return direct
        remote = np.zeros(work.world_size)
        for group, table in enumerate(by_pair):
            for place, rank in enumerate(work.mesh.groups(Group.EXPERT)[group]):
                leg = self._legs(table, place)[number]
                own = place_in(leg.axes, Place(place, work.ep_size, work.ranks_per_node))
                sent, received = sum(leg.input_splits), sum(leg.output_splits)
                remote[rank] = max(sent - leg.input_splits[own], received - leg.output_splits[own])
        return remote

    def _in_group(self, rank: int) -> tuple[int, int]:
        """Which expert group a rank is in, and its place there."""
        mesh = self.workload.mesh
        return mesh.group(rank, Group.EXPERT), mesh.place(rank, Group.EXPERT)

    def _legs(self, table: Counts, place: int) -> tuple[Leg, ...]:
        work = self.workload
        return DISPATCHES[work.dispatch].legs(table, Place(place, work.ep_size, work.ranks_per_node))

    def _number(self, task: Task) -> int:
        """Which leg of the dispatch a task takes, one way or the other."""
        return [hop.op for hop in self.shape.dispatch].index(outward(task.op))

    def _piece(self, task: Task) -> Counts:
        """Rows of the task's microbatch and chunk, [P, E]."""
        assert task.microbatch is not None and task.chunk is not None, task
        held = task.cut.held
        slices_PCE = self.rows[:, task.microbatch, held.start : held.stop, self._moe_layer(task)]
        rows_PE: Counts = slices_PCE.sum(axis=1)
        return rows_PE

    def _table(self, rows_PE: Counts) -> Counts:
        return by_source_and_target(rows_PE, self.placement or self.workload.placement)

    def _moe_layer(self, task: Task) -> int:
        """The task's layer counted among MoE layers."""
        return sum(self.shape.moe_layers[: task.layer])

    @staticmethod
    def _to_experts(task: Task) -> bool:
        """Rows go to the experts in dispatch; in backward, gradients go there in combine."""
        return (task.op in HOME) is task.forward

    def _everywhere(self, seconds: float) -> Seconds:
        return np.full(self.workload.world_size, seconds)
