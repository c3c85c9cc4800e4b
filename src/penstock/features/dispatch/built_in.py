"""The flat all-to-all, and hierarchical ones: rows meet inside the node first, so that few large messages
cross nodes.

A dispatch says where a row from a source for a target stops, leg by leg; `penstock.routing.legs` makes its
legs from that. Nodes have G ranks each, of N nodes; a rank of the expert group is (node, local place).
"""

from __future__ import annotations

from typing import Any

from penstock.graph import Lane
from penstock.mesh import Group, first_of_node, place_in_node
from penstock.ops import Op
from penstock.ops.core import FLAT, Hop
from penstock.routing.legs import Stops


class FlatDispatch(Stops):
    """One leg. Fewest bytes on every link, most messages: each rank sends P - 1 of them.

    AT ─ D ─ X ─ C ─ U          inter
    """

    name = "flat"
    hops = FLAT
    needs_table = False

    @staticmethod
    def stops(source: Any, target: Any, size: int) -> tuple[Any, ...]:
        del source, size
        return (target,)


class HierarchicalDispatch1D(Stops):
    """Gather at the node's first rank, exchange between first ranks, scatter inside the node (FSMoE's 1DH).

    N - 1 messages leave a node instead of G * G * (N - 1); all rows of a node pass through one rank, twice
    over its intra-node link, also those that stay in the node.

        AT ─ DG ─ D ─ DS ─ X ─ CG ─ C ─ CS ─ U          DG, DS, CG, CS intra; D, C inter
    """

    name = "hierarchical_1d"
    hops = (
        Hop(Op.DISPATCH_GATHER, Group.NODE),
        Hop(Op.DISPATCH, Group.EXPERT, Lane.INTER),
        Hop(Op.DISPATCH_SCATTER, Group.NODE),
    )

    @staticmethod
    def stops(source: Any, target: Any, size: int) -> tuple[Any, ...]:
        return first_of_node(source, size), first_of_node(target, size), target


class HierarchicalDispatch2D(Stops):
    """Inside the node first, to the rank with the target's local place; then across nodes (Tutel's 2DH).

    Each rank sends N - 1 messages across nodes, G times as large as flat ones; all ranks share the work.
    Rows whose target has another local place cross the intra-node link once more.

        AT ─ DG ─ D ─ X ─ C ─ CS ─ U          DG, CS intra; D, C inter
    """

    name = "hierarchical_2d"
    hops = (
        Hop(Op.DISPATCH_GATHER, Group.NODE),
        Hop(Op.DISPATCH, Group.RAIL, Lane.INTER),
    )

    @staticmethod
    def stops(source: Any, target: Any, size: int) -> tuple[Any, ...]:
        return first_of_node(source, size) + place_in_node(target, size), target


class NodeOnceDispatch(Stops):
    """Across nodes to the rank of the same place, then inside the node to all ranks that a row is for.

    As DeepSeek-V3 dispatches (technical report, section 3.2.2): a token crosses to every node of its experts
    once. On the way home partial sums are added where the copies were made, and one row crosses back. The
    stops are those of rows that are for one rank each; the legs of rows for several, and how ranks count
    these, are in `penstock.routing.joined`. Rows arrive sorted by the sender's place, then by its node.

        AT ─ D ─ DS ─ X ─ CG ─ C ─ U          D, C inter; DS, CG intra
    """

    name = "node_once"
    hops = (Hop(Op.DISPATCH, Group.RAIL, Lane.INTER), Hop(Op.DISPATCH_SCATTER, Group.NODE))
    joins_rows = True

    @staticmethod
    def stops(source: Any, target: Any, size: int) -> tuple[Any, ...]:
        return first_of_node(target, size) + place_in_node(source, size), target
