"""What the loads of experts say in numbers: how even they are, and how much of them crosses nodes.

Shapes: P ranks, Y MoE layers, E experts, H ranks of an expert group. Loads [P, Y, E]: rows that every rank
has for every expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.mesh import Group, Mesh, node_of
from penstock.placement import ExpertPlacement

Numbers = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """Of one step, each by MoE layer.

    expert_max_over_mean, rank_max_over_mean: the busiest expert's or rank's rows over the mean; 1 = balance.
    entropy: of the experts' shares, over that of equal ones: 1 = balance, 0 = one expert has all.
    crossing_nodes: the share of rows whose expert is on another node; None with one node.
    """

    expert_max_over_mean: tuple[float, ...]
    rank_max_over_mean: tuple[float, ...]
    entropy: tuple[float, ...]
    crossing_nodes: tuple[float, ...] | None

    @staticmethod
    def of(
        loads_PYE: npt.NDArray[np.int32], placements: Sequence[ExpertPlacement], mesh: Mesh, node_size: int
    ) -> LoadFigures:
        """placements: of every MoE layer. node_size: consecutive ranks in one node; 0 = not known."""
        loads = loads_PYE.astype(np.int64)
        nodes = _nodes(mesh, node_size)
        crossing = _floats(_crossing(loads, placements, mesh, nodes)) if len(set(nodes)) > 1 else None
        return LoadFigures(
            expert_max_over_mean=_floats(max_over_mean(loads.sum(axis=0))),
            rank_max_over_mean=_floats(max_over_mean(rank_loads(loads, placements, mesh).T)),
            entropy=_floats(relative_entropy(loads.sum(axis=0))),
            crossing_nodes=crossing,
        )


def max_over_mean(loads: Whole) -> Numbers:
    """The largest over the mean along the last axis; 0 where there is nothing."""
    found: Numbers = loads.max(axis=-1) / np.maximum(loads.mean(axis=-1), 1e-9)
    return found


def relative_entropy(loads: Whole) -> Numbers:
    """Entropy of shares along the last axis, over its largest value; 1 where there is one alone."""
    share = loads / np.maximum(loads.sum(axis=-1, keepdims=True), 1)
    nats = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=-1)
    most = np.log(loads.shape[-1])
    found: Numbers = nats / most if most else np.ones_like(nats)
    return found


def rank_loads(loads_PYE: Whole, placements: Sequence[ExpertPlacement], mesh: Mesh) -> Whole:
    """Rows that the experts of every rank get, [P, Y]: all shards of an expert get all of its rows."""
    found, holders = np.zeros(loads_PYE.shape[:2], dtype=np.int64), mesh.size(Group.EXPERT)
    for members in mesh.groups(Group.EXPERT_SHARDS):
        together_YE = loads_PYE[list(members)].sum(axis=0)
        places = [mesh.place(rank, Group.EXPERT) for rank in members]
        for layer, placement in enumerate(placements):
            by_place = np.bincount(placement.owners, together_YE[layer], minlength=holders)
            found[list(members), layer] = by_place[places].astype(np.int64)
    return found


def _crossing(
    loads_PYE: Whole, placements: Sequence[ExpertPlacement], mesh: Mesh, nodes: Sequence[int]
) -> Numbers:
    """The share of rows whose expert is on another node than the rank that has them, [Y]."""
    node_P = np.array(nodes)
    owners_YE = np.array([placement.owners for placement in placements])
    hosts_PH = np.array([mesh.members(rank, Group.EXPERT) for rank in range(len(nodes))])
    abroad_PYE = node_P[hosts_PH][:, owners_YE] != node_P[:, None, None]
    away_Y = (loads_PYE * abroad_PYE).sum(axis=(0, 2))
    found: Numbers = away_Y / np.maximum(loads_PYE.sum(axis=(0, 2)), 1)
    return found


def _nodes(mesh: Mesh, node_size: int) -> list[int]:
    """The node of every rank; all the same where nodes are not known."""
    return [node_of(rank, node_size) if node_size else 0 for rank in range(mesh.world_size)]


def _floats(numbers: Numbers) -> tuple[float, ...]:
    return tuple(map(float, numbers))
