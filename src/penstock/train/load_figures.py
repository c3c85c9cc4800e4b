"""Figures of the loads of experts: how even they are, and how much of them crosses nodes.

Shapes: P ranks, Y MoE layers, E experts, H ranks of an expert group. Loads [P, Y, E]: rows that every rank
has for every expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.features.expert_replicas.planners import overlap
from penstock.features.expert_replicas.problem import LayerLoad
from penstock.mesh import Group, Mesh, node_of
from penstock.placement import ExpertPlacement, Replication

Numbers = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


class RowsOfReplicas(NamedTuple):
    """Rows that every rank computes, including those of its replicas, and rows that another node computes."""

    rows_PY: Numbers
    away_Y: Numbers

    @staticmethod
    def of_group(
        loads_PYE: npt.NDArray[np.int32],
        replications: Sequence[Replication],
        mesh: Mesh,
        node_size: int,
        rank: int,
    ) -> RowsOfReplicas:
        """Return the rows of ranks that share experts with `rank`; zeros for others, whose replicas differ.

        replications: of these ranks, by MoE layer.
        """
        node_P, holders = np.array(_nodes(mesh, node_size)), mesh.size(Group.EXPERT)
        rows_PY, away_Y = np.zeros(loads_PYE.shape[:2]), np.zeros(loads_PYE.shape[1])
        ranks_HS = np.array(mesh.members(rank, Group.EXPERT_SHARDS)).reshape(holders, -1)
        loads_HYE, node_H = loads_PYE[ranks_HS].sum(axis=1, dtype=np.int64), node_P[ranks_HS[:, 0]]
        for layer, replication in enumerate(replications):
            traffic_HH = LayerLoad.of(loads_HYE[:, layer], replication, node_H.tolist()).traffic
            rows_PY[ranks_HS, layer] = traffic_HH.sum(axis=0)[:, None]
            away_Y[layer] = traffic_HH[node_H[:, None] != node_H].sum()
        return RowsOfReplicas(rows_PY, away_Y)

    def share(self, mesh: Mesh, rank: int) -> tuple[Numbers, Numbers]:
        """Return what `rank` tells all others: its own rows, [Y], and, if it is the first of its group, the
        group's rows that cross nodes, [Y]."""
        first = mesh.members(rank, Group.EXPERT_SHARDS)[0] == rank
        return self.rows_PY[rank], self.away_Y * first

    @staticmethod
    def joined(shares: Sequence[tuple[Numbers, Numbers]]) -> RowsOfReplicas:
        """Return the rows of all groups. shares: by rank."""
        rows, away = zip(*shares, strict=True)
        return RowsOfReplicas(np.stack(rows), np.sum(away, axis=0))


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """Figures of one step, each by MoE layer, named as in `StepMetrics`.

    expert_load_max_over_mean, rank_load_max_over_mean: the busiest expert's or rank's rows over the mean; 1 =
    balance. expert_load_entropy: of the experts' shares, over that of equal ones: 1 = balance, 0 = one expert
    has all. rank_rows_max_over_mean: of what ranks compute, rows of their replicas included.
    rows_crossing_nodes: the share of rows that another node computes; None with one node. loads_in_common:
    with the step before, as `overlap` defines it; None where there is none.
    """

    expert_load_max_over_mean: tuple[float, ...]
    rank_load_max_over_mean: tuple[float, ...]
    expert_load_entropy: tuple[float, ...]
    rank_rows_max_over_mean: tuple[float, ...]
    rows_crossing_nodes: tuple[float, ...] | None
    loads_in_common: tuple[float, ...] | None = None

    @staticmethod
    def of(
        loads_PYE: npt.NDArray[np.int32],
        placements: Sequence[ExpertPlacement],
        mesh: Mesh,
        node_size: int,
        *,
        replica_rows: RowsOfReplicas | None = None,
        before_PYE: npt.NDArray[np.int32] | None = None,
    ) -> LoadFigures:
        """Compute figures. placements: by MoE layer. node_size: consecutive ranks in one node; 0 = unknown.

        replica_rows: of all expert groups; None = no replicas. before_PYE: the loads of the step before, if
        there was one.
        """
        loads, nodes = loads_PYE.astype(np.int64), _nodes(mesh, node_size)
        owned_PY = rank_loads(loads, placements, mesh)
        rows_PY, away_Y = replica_rows or (owned_PY, _away(loads, placements, mesh, nodes))
        in_common = None
        if before_PYE is not None:
            pairs = zip(before_PYE.astype(np.int64).swapaxes(0, 1), loads.swapaxes(0, 1), strict=True)
            in_common = tuple(overlap(before_PE, now_PE) for before_PE, now_PE in pairs)
        crossing = _floats(away_Y / np.maximum(loads.sum(axis=(0, 2)), 1)) if len(set(nodes)) > 1 else None
        return LoadFigures(
            expert_load_max_over_mean=_floats(max_over_mean(loads.sum(axis=0))),
            rank_load_max_over_mean=_floats(max_over_mean(owned_PY.T)),
            expert_load_entropy=_floats(relative_entropy(loads.sum(axis=0))),
            rank_rows_max_over_mean=_floats(max_over_mean(rows_PY.T)),
            rows_crossing_nodes=crossing,
            loads_in_common=in_common,
        )


def max_over_mean(loads: Whole | Numbers) -> Numbers:
    """Return the largest load over the mean along the last axis; 0 without loads."""
    found: Numbers = loads.max(axis=-1) / np.maximum(loads.mean(axis=-1), 1e-9)
    return found


def relative_entropy(loads: Whole) -> Numbers:
    """Return the entropy of shares along the last axis, over its largest value; 1 for a single share."""
    share = loads / np.maximum(loads.sum(axis=-1, keepdims=True), 1)
    nats = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=-1)
    most = np.log(loads.shape[-1])
    found: Numbers = nats / most if most else np.ones_like(nats)
    return found


def rank_loads(loads_PYE: Whole, placements: Sequence[ExpertPlacement], mesh: Mesh) -> Whole:
    """Return the rows that the experts of every rank get, [P, Y]: all shards of an expert get its rows."""
    found, holders = np.zeros(loads_PYE.shape[:2], dtype=np.int64), mesh.size(Group.EXPERT)
    for members in mesh.groups(Group.EXPERT_SHARDS):
        together_YE = loads_PYE[list(members)].sum(axis=0)
        places = [mesh.place(rank, Group.EXPERT) for rank in members]
        for layer, placement in enumerate(placements):
            by_place = np.bincount(placement.owners, together_YE[layer], minlength=holders)
            found[list(members), layer] = by_place[places].astype(np.int64)
    return found


def _away(loads_PYE: Whole, placements: Sequence[ExpertPlacement], mesh: Mesh, nodes: Sequence[int]) -> Whole:
    """Return the rows whose expert is on another node than the rank that has them, [Y]."""
    node_P = np.array(nodes)
    owners_YE = np.array([placement.owners for placement in placements])
    ranks_PH = np.array([mesh.members(rank, Group.EXPERT) for rank in range(len(nodes))])
    abroad_PYE = node_P[ranks_PH][:, owners_YE] != node_P[:, None, None]
    away_Y: Whole = (loads_PYE * abroad_PYE).sum(axis=(0, 2))
    return away_Y


def _nodes(mesh: Mesh, node_size: int) -> list[int]:
    """Return the node of every rank; all the same where nodes are not known."""
    return [node_of(rank, node_size) if node_size else 0 for rank in range(mesh.world_size)]


def _floats(numbers: Numbers) -> tuple[float, ...]:
    return tuple(map(float, numbers))
