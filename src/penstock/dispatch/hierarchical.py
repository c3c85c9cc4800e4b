"""Hierarchical all-to-alls: rows meet inside the node first, so that few large messages cross nodes.

Shapes: N nodes of G ranks; a rank of the expert group is (node, local place). The table is read as
[source node, source place, target node, target place].
"""

from __future__ import annotations

import numpy as np

from penstock.dispatch.base import Leg, Place, Table, blocks
from penstock.graph import Lane
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.transfers import Hop


class HierarchicalDispatch1D:
    """Gather at the node's first rank, exchange between first ranks, scatter inside the node (FSMoE's 1DH).

    N - 1 messages leave a node instead of G * G * (N - 1); all rows of a node pass through one rank, twice
    over its intra-node link, also those that stay in the node.

        AT ─ DG ─ D ─ DS ─ X ─ CG ─ C ─ CS ─ U          DG, DS, CG, CS intra; D, C inter
    """

    name = "hierarchical_1d"
    hops: tuple[Hop, ...] = (
        Hop(Op.DISPATCH_GATHER, Group.NODE),
        Hop(Op.DISPATCH, Group.EXPERT, Lane.INTER),
        Hop(Op.DISPATCH_SCATTER, Group.NODE),
    )
    needs_table = True
    joins_rows = False

    def legs(self, table: Table, place: Place) -> tuple[Leg, ...]:
        rows = _by_node(table, place)
        return _gather(rows, place), _between_leaders(rows, place), _scatter(rows, place)


class HierarchicalDispatch2D:
    """Inside the node first, to the rank with the target's local place; then across nodes (Tutel's 2DH).

    Each rank sends N - 1 messages across nodes, G times as large as flat ones; all ranks share the work.
    Rows whose target has another local place cross the intra-node link once more.

        AT ─ DG ─ D ─ X ─ C ─ CS ─ U          DG, CS intra; D, C inter
    """

    name = "hierarchical_2d"
    hops: tuple[Hop, ...] = (
        Hop(Op.DISPATCH_GATHER, Group.NODE),
        Hop(Op.DISPATCH, Group.RAIL, Lane.INTER),
    )
    needs_table = True
    joins_rows = False

    def legs(self, table: Table, place: Place) -> tuple[Leg, ...]:
        rows, node, local = _by_node(table, place), place.node, place.local
        mine_NG = rows[node, local]  # by target node, target place
        to_peers = blocks(mine_NG.sum(axis=0))
        from_peers = blocks(rows[node, :, :, local].sum(axis=1))
        first = Leg(Group.NODE, blocks(mine_NG), _transposed(*mine_NG.shape), to_peers, from_peers)
        held_GN = rows[node, :, :, local]  # by source place, target node
        to_nodes = blocks(held_GN.sum(axis=0))
        from_nodes = blocks(rows[:, :, node, local].sum(axis=1))
        second = Leg(Group.RAIL, blocks(held_GN), _transposed(*held_GN.shape), to_nodes, from_nodes)
        return first, second


def _by_node(table: Table, place: Place) -> Table:
    shape = (place.nodes, place.node_size)
    return table.reshape(*shape, *shape)


def _gather(rows: Table, place: Place) -> Leg:
    """Return the leg of all rows to the first rank of the node, in stored order."""
    mine = blocks(rows[place.node, place.local])
    to_peers = [0] * place.node_size
    to_peers[0] = sum(mine)
    from_peers = [0] * place.node_size
    if place.local == 0:
        from_peers = list(blocks(rows[place.node].sum(axis=(1, 2))))
    return Leg(Group.NODE, mine, tuple(range(len(mine))), tuple(to_peers), tuple(from_peers))


def _between_leaders(rows: Table, place: Place) -> Leg:
    """Return the leg between the first ranks of the nodes; other ranks send nothing."""
    nothing = (0,) * place.ep_size
    if place.local:
        return Leg(Group.EXPERT, (), (), nothing, nothing)
    size, node = place.node_size, place.node
    held_GNG = rows[node]  # by source place, target node, target place
    order = np.arange(held_GNG.size).reshape(held_GNG.shape).transpose(1, 0, 2)
    to_leaders, from_leaders = np.zeros((2, place.ep_size), dtype=np.int64)
    to_leaders[::size] = held_GNG.sum(axis=(0, 2))
    from_leaders[::size] = rows[:, :, node].sum(axis=(1, 2))
    return Leg(Group.EXPERT, blocks(held_GNG), blocks(order), blocks(to_leaders), blocks(from_leaders))


def _scatter(rows: Table, place: Place) -> Leg:
    """Return the leg from the first rank of the node to the rows' target ranks."""
    node = place.node
    from_peers = [0] * place.node_size
    from_peers[0] = int(rows[:, :, node, place.local].sum())
    if place.local:
        return Leg(Group.NODE, (), (), (0,) * place.node_size, tuple(from_peers))
    held_NGG = rows[:, :, node]  # by source node, source place, target place
    order = np.arange(held_NGG.size).reshape(held_NGG.shape).transpose(2, 0, 1)
    to_peers = blocks(held_NGG.sum(axis=(0, 1)))
    return Leg(Group.NODE, blocks(held_NGG), blocks(order), to_peers, tuple(from_peers))


def _transposed(rows: int, columns: int) -> tuple[int, ...]:
    """Return the block numbers of a [rows, columns] arrangement, column by column."""
    return blocks(np.arange(rows * columns).reshape(rows, columns).T)
