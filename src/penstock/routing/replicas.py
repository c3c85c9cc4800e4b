"""Rows of experts that several ranks have: which position gets how many.

Shapes: P ranks of the world, E experts, Q positions of an expert group, S sources of such a group.
"""

from __future__ import annotations

import numpy as np

from penstock.apportion import Counts
from penstock.mesh import Group, Mesh, node_of
from penstock.placement import SPLIT, Replication
from penstock.placing.exact import ExactSplit


def rows_by_position(rows_PE: Counts, replication: Replication, mesh: Mesh) -> Counts:
    """Return the rows of one piece by position instead of by expert, [P, Q]. No row is lost."""
    if replication.limit is not None:
        nodes = tuple(node_of(rank, mesh.local_size) for rank in range(mesh.ep_size))
        split, sources = ExactSplit.of(replication, nodes), mesh.ep_size * mesh.etp_size
        groups = rows_PE.reshape(-1, sources, 1, rows_PE.shape[1])
        return np.concatenate([split.table(rows_SCE) for rows_SCE in groups]).reshape(len(rows_PE), -1)
    pairs, found = replication.pairs, np.zeros((len(rows_PE), replication.positions), np.int64)
    place_P = np.array([mesh.place(rank, Group.EXPERT) for rank in range(mesh.world_size)])
    for place in range(mesh.ep_size):
        here, own = np.flatnonzero(place_P == place), pairs.of(place)
        expert, position, before, upto = (each[own] for each in pairs[1:])
        rows_PK = rows_PE[here][:, expert]
        np.add.at(found, (here[:, None], position), rows_PK * upto // SPLIT - rows_PK * before // SPLIT)
    return found
