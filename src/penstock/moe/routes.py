"""How many rows go where: the sizes that dispatch, experts and combine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkRoute:
    """Row counts of one chunk on one rank, plain integers on the host.

    sent: [ep][local experts] rows this rank sends to each expert of each rank.
    received: [ep][local experts] rows this rank gets from each rank for each of its experts.
    """

    sent: Sequence[Sequence[int]]
    received: Sequence[Sequence[int]]

    @property
    def input_splits(self) -> list[int]:
        """Rows to each rank of the expert group."""
        return [sum(experts) for experts in self.sent]

    @property
    def output_splits(self) -> list[int]:
        """Rows from each rank of the expert group."""
        return [sum(experts) for experts in self.received]


@dataclass(frozen=True)
class Routes:
    """The routes of all chunks of one microbatch in one layer."""

    chunks: tuple[ChunkRoute, ...]

    @staticmethod
    def even(slots: Sequence[int], ep_size: int, local_experts: int) -> Routes:
        """Fixed sizes: every rank sends `slots[c]` rows to every expert in chunk c."""
        return Routes(
            tuple(ChunkRoute(table, table) for s in slots for table in [[[s] * local_experts] * ep_size])
        )

    @staticmethod
    def from_counts(sent: list[list[list[int]]], received: list[list[list[int]]]) -> Routes:
        """From exchanged counts, both [ep][chunk][local expert]."""
        chunks = range(len(sent[0]))
        return Routes(
            tuple(ChunkRoute([peer[c] for peer in sent], [peer[c] for peer in received]) for c in chunks)
        )
