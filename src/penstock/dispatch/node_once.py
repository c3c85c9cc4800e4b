"""One copy per node: a token crosses to every node of its experts once, and is copied inside it.

As DeepSeek-V3 dispatches (technical report, section 3.2.2): over the slow link to the rank with the sender's
place, from there to the ranks that need it. On the way home those ranks' partial sums are added where the
copies were made, and one row crosses back.
Shapes: P ranks, N nodes of G ranks, S sets of places in a node, numbered from the set of the first place
alone: place p is in set s where bit p of s + 1 is set.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from penstock.dispatch.base import Leg, Place, Table, blocks
from penstock.graph import Lane
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.transfers import Hop

MOST_NODE_SIZE = 8
"""Largest node: ranks exchange the number of rows for every set of places in a node, 255 numbers for 8."""


class NodeOnceDispatch:
    """Across nodes to the rank of the same place, then inside the node to all ranks that a row is for.

    Fewest bytes between nodes: all rows of a token for one node are one. `legs` are those of rows that are
    for one rank each; `joined_legs` those of rows for several. Rows arrive sorted by the sender's place, then
    by its node.

        AT ─ D ─ DS ─ X ─ CG ─ C ─ U          D, C inter; DS, CG intra
    """

    name = "node_once"
    hops: tuple[Hop, ...] = (Hop(Op.DISPATCH, Group.RAIL, Lane.INTER), Hop(Op.DISPATCH_SCATTER, Group.NODE))
    needs_table = True
    joins_rows = True

    def legs(self, table: Table, place: Place) -> tuple[Leg, ...]:
        here = slice(place.node * place.node_size, (place.node + 1) * place.node_size)
        sent_NG = table[place.rank].reshape(place.nodes, place.node_size)
        return _legs(sent_NG, table[:, here], np.eye(place.node_size, dtype=np.int64), place)


def joined_legs(sent_NS: Table, received_PS: Table, place: Place) -> tuple[Leg, Leg]:
    """Return the legs of the rank at `place`, whose rows are sorted by node and set of places.

    sent: rows for every node, by set. received: rows from every rank for this node, by set.
    """
    return _legs(sent_NS, received_PS, sets_of(place.node_size), place)


def _legs(sent_NS: Table, received_PS: Table, reached_SG: Table, place: Place) -> tuple[Leg, Leg]:
    """Return the same for rows for some of the sets only. reached: which places are in each of these."""
    received_NGS = received_PS.reshape(place.nodes, place.node_size, -1)
    held_NS = received_NGS[:, place.local]
    to_nodes = blocks(sent_NS.sum(axis=1))
    across = Leg(Group.RAIL, to_nodes, tuple(range(place.nodes)), to_nodes, blocks(held_NS.sum(axis=1)))
    filled = np.flatnonzero(held_NS)  # most sets are empty where there are many
    reached_BG = reached_SG[filled % held_NS.shape[1]]
    inside = Leg(
        Group.NODE,
        blocks(held_NS.reshape(-1)[filled]),
        blocks(np.nonzero(reached_BG.T)[1]),
        blocks((held_NS @ reached_SG).sum(axis=0)),
        blocks((received_NGS @ reached_SG[:, place.local]).sum(axis=0)),
    )
    return across, inside


def joined_sizes(nodes_PN: Table, ranks_PP: Table, place: Place) -> tuple[Leg, Leg]:
    """Return the legs of `joined_legs` without blocks, as far as sizes are concerned.

    nodes, ranks: from every rank the rows for every node, and the copies for every rank.
    """
    source = np.arange(place.nodes) * place.node_size + place.local  # ranks whose rows come here first
    here = slice(place.node * place.node_size, (place.node + 1) * place.node_size)
    copies_NGG = ranks_PP[:, here].reshape(place.nodes, place.node_size, place.node_size)
    across = Leg(Group.RAIL, (), (), blocks(nodes_PN[place.rank]), blocks(nodes_PN[source, place.node]))
    into = blocks(copies_NGG[:, place.local].sum(axis=0))
    return across, Leg(Group.NODE, (), (), into, blocks(copies_NGG[:, :, place.local].sum(axis=0)))


def arrivals(received_PS: Table, place: Place) -> tuple[int, ...]:
    """Return the sizes of the blocks in which rows are stored at the rank at `place` on arrival."""
    received_NGS = received_PS.reshape(place.nodes, place.node_size, -1)
    mine_S = sets_of(place.node_size)[:, place.local].astype(bool)
    return blocks(received_NGS[:, :, mine_S].transpose(1, 0, 2))


def num_sets(node_size: int) -> int:
    """Return S, the number of sets of at least one place."""
    return int(2**node_size - 1)


@cache
def sets_of(node_size: int) -> npt.NDArray[np.int64]:
    """Return which places are in every set, [S, G], 0 or 1."""
    number_S1, place_G = np.arange(1, num_sets(node_size) + 1)[:, None], np.arange(node_size)
    found: npt.NDArray[np.int64] = number_S1 >> place_G & 1
    found.setflags(write=False)
    return found
