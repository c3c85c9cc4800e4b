"""How many rows go where: the sizes that dispatch, experts and combine share, plain integers on the host.

Shapes: P ranks of the expert group, C chunks, N counts per rank and chunk: one per local expert, and where an
order sends fewer rows than expert inputs, the number of rows behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dispatch import Dispatch, Leg, Place

Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class ChunkRoute:
    """One chunk on one rank.

    sent: [P][local experts] inputs for each expert of each rank. received: the same from each rank for each
    of this rank's experts. rows_sent, rows_received: rows by rank. legs: the transfers; none if alone.
    """

    sent: Sequence[Sequence[int]]
    received: Sequence[Sequence[int]]
    rows_sent: tuple[int, ...]
    rows_received: tuple[int, ...]
    legs: tuple[Leg, ...] = ()

    @property
    def rows_per_expert(self) -> list[int]:
        """Inputs of each local expert."""
        return [sum(column) for column in zip(*self.received, strict=True)]


@dataclass(frozen=True)
class RouteMaker:
    """What turns counts into routes on one rank. row_counts: the last count is the number of rows."""

    dispatch: Dispatch
    place: Place
    row_counts: bool = False

    def from_pair(self, sent_PCN: Counts, received_PCN: Counts) -> Routes:
        """From what this rank sends and receives; enough for a flat dispatch."""
        sizes = len(sent_PCN)
        tables = np.zeros((sent_PCN.shape[1], sizes, sizes), dtype=np.int64)
        tables[:, self.place.rank] = self._rows(sent_PCN).T
        tables[:, :, self.place.rank] = self._rows(received_PCN).T
        return self._routes(sent_PCN, received_PCN, tables)

    def from_table(self, table_PPCN: Counts) -> Routes:
        """From what every rank sends to every rank."""
        rank = self.place.rank
        tables = self._rows(table_PPCN).transpose(2, 0, 1)
        return self._routes(table_PPCN[rank], table_PPCN[:, rank], tables)

    def even(self, slots: Sequence[int], local_experts: int) -> Routes:
        """Fixed sizes: every rank sends `slots[c]` rows to every expert in chunk c."""
        ranks = self.place.ep_size
        counts_C1 = np.asarray(slots, dtype=np.int64)[:, None]
        return self.from_table(np.broadcast_to(counts_C1, (ranks, ranks, len(slots), local_experts)))

    def _rows(self, counts: Counts) -> Counts:
        rows: Counts = counts[..., -1] if self.row_counts else counts.sum(axis=-1)
        return rows

    def _routes(self, sent_PCN: Counts, received_PCN: Counts, tables: Counts) -> Routes:
        rank = self.place.rank
        experts = slice(None, -1) if self.row_counts else slice(None)
        chunks = [
            ChunkRoute(
                sent=sent_PCN[:, c, experts].tolist(),
                received=received_PCN[:, c, experts].tolist(),
                rows_sent=tuple(table[rank].tolist()),
                rows_received=tuple(table[:, rank].tolist()),
                legs=self.dispatch.legs(table, self.place) if self.place.ep_size > 1 else (),
            )
            for c, table in enumerate(tables)
        ]
        return Routes(tuple(chunks))


@dataclass(frozen=True)
class Routes:
    """The routes of all chunks of one microbatch in one layer."""

    chunks: tuple[ChunkRoute, ...]
