"""The flat all-to-all: every rank sends every other rank its rows directly."""

from __future__ import annotations

from penstock.dispatch.base import Leg, Place, Table, blocks
from penstock.mesh import Group
from penstock.ops.transfers import FLAT, Hop


class FlatDispatch:
    """One leg. Fewest bytes on every link, most messages: each rank sends P - 1 of them.

    AT ─ D ─ X ─ C ─ U          inter
    """

    name = "flat"
    hops: tuple[Hop, ...] = FLAT
    needs_table = False
    joins_rows = False

    def legs(self, table: Table, place: Place) -> tuple[Leg, ...]:
        sent, received = blocks(table[place.rank]), blocks(table[:, place.rank])
        return (Leg(Group.EXPERT, sent, tuple(range(place.ep_size)), sent, received),)
