"""Routes where one row serves all of its token's experts in a node.

Shapes: P ranks of an expert group, N nodes of G ranks, C slices, L experts of a rank, S sets of places in a
node. Counts from a rank for a rank are L inputs of experts, then S numbers of rows for that rank's node.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dispatch import Dispatch, Place
from penstock.dispatch.base import blocks
from penstock.dispatch.node_once import arrivals, joined_legs, num_sets
from penstock.moe.fit import check_dispatch
from penstock.moe.orders.base import Order
from penstock.moe.routes import ChunkRoute, Counts, Degrees, RouteMaker, Routes


@dataclass(frozen=True)
class JoinedRoutes(RouteMaker):
    """Routes whose blocks of rows are for a node and a set of places in it.

    A rank needs no others' counts.
    """

    @property
    def needs_table(self) -> bool:
        return False

    def from_pair(self, sent: Counts, received: Counts, degrees: Degrees | None = None) -> Routes:
        """Make routes from what this rank sends to every rank and receives from it, [P, C, L + S]."""
        slices = sent.shape[1]
        cuts = {chunks: self._pieces(sent, received, chunks) for chunks in {slices, *(degrees or ())}}
        return Routes(cuts[slices], cuts)

    def from_table(self, table: Counts, degrees: Degrees | None = None) -> Routes:
        rank = self.place.rank
        return self.from_pair(table[rank], table[:, rank], degrees)

    def _pieces(self, sent: Counts, received: Counts, chunks: int) -> tuple[ChunkRoute, ...]:
        """Return the routes of chunks that consist of several slices each."""
        both = (each.reshape(len(each), chunks, -1, each.shape[2]).sum(axis=2) for each in (sent, received))
        sent, received = both
        return tuple(self._piece(sent[:, c], received[:, c]) for c in range(chunks))

    def _piece(self, sent_PN: Counts, received_PN: Counts) -> ChunkRoute:
        experts = sent_PN.shape[1] - num_sets(self.place.node_size)
        sent_NS = sent_PN[:: self.place.node_size, experts:]  # all ranks of a node get the same counts
        received_PS = received_PN[:, experts:]
        return ChunkRoute(
            sent=sent_PN[:, :experts].tolist(),
            received=received_PN[:, :experts].tolist(),
            rows_sent=blocks(sent_NS),
            rows_received=arrivals(received_PS, self.place),
            legs=joined_legs(sent_NS, received_PS, self.place),
        )


def route_maker(dispatch: Dispatch, place: Place, order: Order) -> RouteMaker:
    """Return the maker of the routes of whole experts. Raises ValueError for an order of other nodes."""
    check_dispatch(order, dispatch, place.node_size)
    if dispatch.joins_rows and place.ep_size > 1:
        return JoinedRoutes(dispatch, place)
    return RouteMaker(dispatch, place, order.row_counts)
