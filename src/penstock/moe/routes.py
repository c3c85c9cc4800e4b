"""Numbers of rows for every target: sizes that dispatch, experts and combine share, integers on the host.

Counts are known by slice, rows travel by chunk: a chunk, forward or backward, is a run of whole slices.
Shapes: P ranks of the expert group, C slices (the chunks of a plan of an order), N counts per rank and slice:
one per local expert, and where an order sends fewer rows than expert inputs, the rows they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from penstock.dispatch import Dispatch, Leg, Place
from penstock.moe.sizes import GroupSizes

Counts = np.ndarray[Any, np.dtype[np.int64]]
Degrees = tuple[int, ...]
"""The numbers of chunks in which rows of an MoE layer travel; each divides the number of slices."""

FIXED_KEPT = 512
"""Routes of fixed sizes that are kept: those of some hundred layers, in training and in evaluation."""


@dataclass(frozen=True)
class ChunkRoute:
    """Sizes of one slice, or of one chunk of several slices, on one rank.

    sent: [P][local experts] inputs for each expert of each rank. received: inputs from each rank for each
    of this rank's experts. rows_sent, rows_received: rows by rank. legs: the transfers; none if alone,
    or for a slice that never travels by itself.
    """

    sent: Sequence[Sequence[int]]
    received: Sequence[Sequence[int]]
    rows_sent: tuple[int, ...]
    rows_received: tuple[int, ...]
    legs: tuple[Leg, ...] = ()

    @cached_property
    def rows_per_expert(self) -> GroupSizes:
        """Number of inputs of each local expert; one object, whose copy on the device serves all products."""
        return GroupSizes(sum(column) for column in zip(*self.received, strict=True))


@dataclass(frozen=True)
class RouteMaker:
    """Turns counts into routes on one rank. row_counts: the last count is the number of rows."""

    dispatch: Dispatch
    place: Place
    row_counts: bool = False

    @property
    def needs_table(self) -> bool:
        """Whether a rank must know what the others send to each other, not only its own share."""
        return self.dispatch.needs_table

    def from_pair(self, sent_PCN: Counts, received_PCN: Counts, degrees: Degrees | None = None) -> Routes:
        """Make routes from what this rank sends and receives, which is enough for a flat dispatch.

        degrees: none = every slice is a chunk.
        """
        sizes = len(sent_PCN)
        tables = np.zeros((sent_PCN.shape[1], sizes, sizes), dtype=np.int64)
        tables[:, self.place.rank] = self._rows(sent_PCN).T
        tables[:, :, self.place.rank] = self._rows(received_PCN).T
        return self._routes(_Tables(sent_PCN, received_PCN, tables), degrees)

    def from_everyone(self, counts_SCX: Counts, degrees: Degrees | None = None) -> Routes:
        """Make routes from the counts of all ranks concerned: by slice, X = N counts per rank, by rank."""
        by_rank_SCPN = counts_SCX.reshape(*counts_SCX.shape[:2], self.place.ep_size, -1)
        return self.from_table(by_rank_SCPN.transpose(0, 2, 1, 3), degrees)

    def from_table(self, table_PPCN: Counts, degrees: Degrees | None = None) -> Routes:
        """Make routes from what every rank sends to every rank."""
        rank = self.place.rank
        tables = self._rows(table_PPCN).transpose(2, 0, 1)
        return self._routes(_Tables(table_PPCN[rank], table_PPCN[:, rank], tables), degrees)

    def even(self, slots: Sequence[int], local_experts: int, degrees: Degrees | None = None) -> Routes:
        """Make routes of fixed sizes: every rank sends `slots[c]` rows to every expert in slice c."""
        counts_C1 = np.asarray(slots, dtype=np.int64)[:, None]
        return self.fixed(np.repeat(counts_C1, self.place.ep_size * local_experts, axis=1), degrees)

    def fixed(self, rows_CX: Counts, degrees: Degrees | None = None) -> Routes:
        """Make routes of fixed sizes: every rank sends as many rows to each position. X = all positions.

        The sizes are those of all microbatches, layers and steps, so their routes are made once: a table of
        what every rank sends to every rank takes the host 0.3 ms for 64 ranks and 128 experts.
        """
        return _fixed(self, rows_CX.shape, rows_CX.tobytes(), degrees)

    @property
    def sources(self) -> int:
        """The number of ranks that send rows."""
        return self.place.ep_size

    def _rows(self, counts: Counts) -> Counts:
        rows: Counts = counts[..., -1] if self.row_counts else counts.sum(axis=-1)
        return rows

    def _routes(self, tables: _Tables, degrees: Degrees | None) -> Routes:
        slices = len(tables.rows_CPP)
        degrees = degrees or (slices,)
        whole = self._cut(tables, travels=slices in degrees)
        found = {chunks: self._cut(tables.summed(chunks)) for chunks in degrees if chunks != slices}
        return Routes(whole, {slices: whole, **found})

    def _cut(self, tables: _Tables, *, travels: bool = True) -> tuple[ChunkRoute, ...]:
        rank, legs = self.place.rank, travels and self.place.ep_size > 1
        experts = slice(None, -1) if self.row_counts else slice(None)
        return tuple(
            ChunkRoute(
                sent=tables.sent_PCN[:, c, experts].tolist(),
                received=tables.received_PCN[:, c, experts].tolist(),
                rows_sent=tuple(table[rank].tolist()),
                rows_received=tuple(table[:, rank].tolist()),
                legs=self.dispatch.legs(table, self.place) if legs else (),
            )
            for c, table in enumerate(tables.rows_CPP)
        )


@lru_cache(maxsize=FIXED_KEPT)
def _fixed(maker: RouteMaker, shape: tuple[int, ...], rows: bytes, degrees: Degrees | None) -> Routes:
    """Make routes of fixed sizes. rows: rows_CX of `RouteMaker.fixed` as bytes, which can be looked up."""
    rows_CX: Counts = np.frombuffer(rows, dtype=np.int64).reshape(shape)
    brought_PCN = rows_CX.reshape(len(rows_CX), maker.place.ep_size, -1).transpose(1, 0, 2)
    return maker.from_table(np.broadcast_to(brought_PCN, (maker.sources, *brought_PCN.shape)), degrees)


@dataclass(frozen=True)
class _Tables:
    """The counts that a rank sends and receives in every piece, and the rows from each rank to each rank."""

    sent_PCN: Counts
    received_PCN: Counts
    rows_CPP: Counts

    def summed(self, chunks: int) -> _Tables:
        """Return the tables of `chunks` pieces, each the sum of several of these pieces."""
        return _Tables(
            self.sent_PCN.reshape(len(self.sent_PCN), chunks, -1, self.sent_PCN.shape[2]).sum(axis=2),
            self.received_PCN.reshape(len(self.received_PCN), chunks, -1, self.received_PCN.shape[2]).sum(
                axis=2
            ),
            self.rows_CPP.reshape(chunks, -1, *self.rows_CPP.shape[1:]).sum(axis=1),
        )


@dataclass(frozen=True)
class Routes:
    """Sizes of all slices of one microbatch in one layer, and of the chunks in which they travel.

    cuts: the chunks, by their number. at_experts: the sizes of slices as experts get them, where they differ
    from those that arrive from other nodes. shares: of every slice, where ranks share experts. home:
    positions in the order in which a slice's rows lie at home; () = by position, as they leave.
    """

    slices: tuple[ChunkRoute, ...]
    cuts: Mapping[int, tuple[ChunkRoute, ...]]
    at_experts: tuple[ChunkRoute, ...] = ()
    shares: tuple[Shares, ...] = ()
    home: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.at_experts:
            object.__setattr__(self, "at_experts", self.slices)


@dataclass(frozen=True)
class Shares:
    """One slice on ranks that share experts or attention, in rows.

    peers: rows that each rank sharing this one's experts brings to them. blocks: own rows and those of each
    such rank, by target rank, [rank][target]. counts: this rank's rows by position, before they are dealt.
    """

    peers: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
