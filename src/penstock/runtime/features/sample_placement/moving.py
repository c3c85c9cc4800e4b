"""How samples get their homes while a stack runs: which placer decides, and its view of the layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from penstock.apportion import Counts
from penstock.features.sample_placement.assign import assign
from penstock.features.sample_placement.feature import Prediction
from penstock.features.sample_placement.prediction import ConditionalTable
from penstock.features.sample_placement.rows import Nearness, sample_problem
from penstock.features.sample_placement.solvers import prepare
from penstock.placement import Replication
from penstock.routing.samples import ExchangeGroup, Plane, SampleTable, exchange_group_of
from penstock.topology import Layout


class Placer(Protocol):
    """Decides which device every sample lives on from the next combine on; alike on all members."""

    def prepare(self) -> None:
        """Load what the placer needs, so that the first step does not wait for it."""
        ...

    def homes(self, table: SampleTable, following: Replication | None, moved_rows: int) -> Counts:
        """Return the device of every sample, [I]; every device keeps as many of each chunk as it had.

        following: where experts of the next MoE layer are; None after the last. moved_rows: the data that
        follows a sample beside its experts' outputs, measured in rows.
        """
        ...


@dataclass(frozen=True)
class NetMoE:
    """Minimises rows across nodes, then devices, in this combine and the next dispatch. solver: by name."""

    solver: str = "network_simplex"

    def prepare(self) -> None:
        prepare(self.solver)

    def homes(self, table: SampleTable, following: Replication | None, moved_rows: int) -> Counts:
        homes, expects = table.device_I.copy(), following is not None and table.expected_IE.shape[1] > 0
        for plane in table.exchange_group.planes:
            near = _nearness(following, plane) if following is not None and expects else None
            local_D = np.full(table.exchange_group.devices, -1)
            local_D[list(plane.devices)] = np.arange(len(plane.devices))
            for chunk in range(table.chunks):
                here = np.flatnonzero((table.chunk_I == chunk) & (local_D[table.device_I] >= 0))
                if here.size:
                    problem = sample_problem(
                        counts=table.rows_IKPN[here].sum(axis=1).reshape(len(here), -1),
                        homes=local_D[homes[here]],
                        moved_rows=np.full(len(here), moved_rows),
                        node_of_device=np.array(plane.node_D),
                        predictions=None if near is None else table.expected_IE[here],
                        following=near,
                    )
                    homes[here] = np.array(plane.devices)[assign(problem, self.solver)]
        return homes


@lru_cache(maxsize=64)
def _nearness(replication: Replication, plane: Plane) -> Nearness:
    """Return how near devices and nodes are to experts. Cached: it changes with the replication only."""
    return Nearness.of_devices(replication, np.array(plane.device_P), np.array(plane.node_D))


@dataclass(frozen=True)
class SampleMoving:
    """How a stack moves samples.

    placer: decides on homes. prediction: the source of what samples are expected to want of the next MoE
    layer: what its gate says of their tokens in this layer, what samples like them wanted in past steps, or
    nothing.
    """

    placer: Placer = NetMoE()
    prediction: Prediction = "next_gate"


@dataclass(frozen=True, kw_only=True)
class Visit:
    """The samples of a microbatch in an MoE layer. here, following: where its experts and those of the next
    MoE layer are; None after the last. training: whether something is learnt."""

    layer: int
    microbatch: int
    here: Replication
    following: Replication | None
    training: bool


class Habits:
    """Which experts of the next MoE layer follow on which of this one, learnt while samples pass both.

    Every layer is reported in turn, alike on all members; old observations fade slowly. Shapes: I samples, E
    experts.
    """

    def __init__(self) -> None:
        self._tables: dict[int, ConditionalTable] = {}
        self._passed: dict[int, tuple[int, Counts]] = {}

    def expected(self, counts_IE: Counts, visit: Visit) -> Counts:
        """Return the rows of every sample by expert of the next layer."""
        layer, before_IE = self._passed.pop(visit.microbatch, (visit.layer, counts_IE))
        if layer < visit.layer and visit.training:
            self.table(layer, before_IE.shape[1]).learn(before_IE, counts_IE)
        return self.table(visit.layer, counts_IE.shape[1]).predict(counts_IE)

    def left(self, counts_IE: Counts, visit: Visit) -> None:
        """Note that samples have left the layer. counts_IE: in their order in the next layer."""
        self._passed[visit.microbatch] = visit.layer, counts_IE

    def table(self, layer: int, num_experts: int) -> ConditionalTable:
        """Return what is known of a layer; an empty table at first."""
        return self._tables.setdefault(layer, ConditionalTable(num_experts))


@dataclass(frozen=True)
class Relocation:
    """How samples move on one rank. exchange_group: ranks that exchange counts. member: this rank's number
    there."""

    how: SampleMoving
    exchange_group: ExchangeGroup
    member: int
    habits: Habits

    @staticmethod
    def on(layout: Layout, how: SampleMoving, habits: Habits) -> Relocation:
        """Return how samples of this rank's group move."""
        how.placer.prepare()
        member = layout.mesh.place(layout.rank, layout.mesh.all_experts)
        return Relocation(how, exchange_group_of(layout.mesh, layout.rank, layout.node_size), member, habits)

    def homes(self, table: SampleTable, visit: Visit, moved_rows: int) -> Counts:
        """Return the device of every sample. moved_rows: see Placer."""
        if self.how.prediction != "conditional":
            return self.how.placer.homes(table, visit.following, moved_rows)
        counts_IE = table.by_expert(visit.here.by_position, visit.here.placement.num_experts)
        expected_IE = self.habits.expected(counts_IE, visit)
        if visit.following is not None:
            table = replace(table, expected_IE=expected_IE)
        device_I = self.how.placer.homes(table, visit.following, moved_rows)
        self.habits.left(counts_IE[np.lexsort((table.place_I(device_I), device_I))], visit)
        return device_I
