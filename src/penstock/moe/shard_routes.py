"""Routes where ranks share experts: every rank knows what all ranks send to each other.

Shapes: P ranks of an expert group, S ranks that share every expert, C slices, N experts of a rank. A rank is
(its place in the expert group, its shard). A table [P, S, P, C, N] holds what each rank brings, by target.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.dispatch import Leg
from penstock.dispatch.base import blocks
from penstock.mesh import Group
from penstock.moe.routes import ChunkRoute, Counts, Degrees, RouteMaker, Routes, Shares


@dataclass(frozen=True)
class ShardPlace:
    """Place of a rank among those that share its experts.

    size, rank: shards of every expert, and which of them this rank has. dealt: ranks that have the same rows
    and deal them, 1 = none. turns: the turn in which every rank of the expert group is dealt rows, [P][S].
    """

    size: int = 1
    rank: int = 0
    dealt: int = 1
    turns: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ShardRouteMaker(RouteMaker):
    """Makes routes of one rank among those that share its experts.

    A subclass is one way to meet all shards.
    """

    shards: ShardPlace = ShardPlace()

    @property
    def needs_table(self) -> bool:
        return True

    def from_table(self, table: Counts, degrees: Degrees | None = None) -> Routes:
        """Make routes from what every rank brings to every target, [P S, P, C, N]."""
        ranks = self.place.ep_size
        whole = table.reshape(ranks, self.shards.size, *table.shape[1:])
        return self._routes_of(whole, degrees or (table.shape[2],))

    @property
    def sources(self) -> int:
        return self.place.ep_size * self.shards.size

    def _routes_of(self, table: Counts, degrees: Degrees) -> Routes:
        place, shard = self.place.rank, self.shards.rank
        brought = self._dealt(table)
        rows = brought.sum(axis=-1)  # [P, S, P, C]
        slices = tuple(self._slice(brought[:, :, :, c]) for c in range(table.shape[3]))
        cuts = {n: tuple(self._leg(piece) for piece in _pieces(rows, n)) for n in {*degrees, len(slices)}}
        shares = tuple(
            Shares(
                peers=blocks(rows[:, :, place, c].sum(axis=0)),
                blocks=tuple(blocks(rows[place, peer, :, c]) for peer in range(self.shards.size)),
                counts=blocks(table[place, shard, :, c]),
            )
            for c in range(len(slices))
        )
        at_experts = tuple(self._at_experts(brought[:, :, :, c], made) for c, made in enumerate(slices))
        return Routes(slices, cuts, at_experts, shares)

    def _dealt(self, table: Counts) -> Counts:
        """Return the rows that every rank sends of those it brings: every n-th row of an expert, by turns."""
        if self.shards.dealt == 1:
            return table
        turn = np.asarray(self.shards.turns)[:, :, None, None, None]
        share: Counts = (table - turn + self.shards.dealt - 1) // self.shards.dealt
        return share

    @abstractmethod
    def _slice(self, brought: Counts) -> ChunkRoute:
        """Return one slice in transit between ranks of the expert group. brought: [P, S, P, N]."""

    @abstractmethod
    def _leg(self, rows: Counts) -> ChunkRoute:
        """Return one chunk with its legs. rows: [P, S, P]."""

    @abstractmethod
    def _at_experts(self, brought: Counts, made: ChunkRoute) -> ChunkRoute:
        """Return the slice as experts get it, from all ranks that bring rows to them."""


class GatheredRoutes(ShardRouteMaker):
    """FSMoE's routes: between nodes every shard has its own rows; experts get them shard by shard."""

    def _slice(self, brought: Counts) -> ChunkRoute:
        mine = brought[:, self.shards.rank]
        return _route(mine[self.place.rank], mine[:, self.place.rank])

    def _leg(self, rows: Counts) -> ChunkRoute:
        plane, rank = rows[:, self.shards.rank], self.place.rank
        legs = self.dispatch.legs(plane, self.place) if self.place.ep_size > 1 else ()
        return ChunkRoute((), (), blocks(plane[rank]), blocks(plane[:, rank]), legs)

    def _at_experts(self, brought: Counts, made: ChunkRoute) -> ChunkRoute:
        return _received(made, brought[:, :, self.place.rank].transpose(1, 0, 2))


class FusedRoutes(ShardRouteMaker):
    """Parm's routes: a row goes to every shard of its expert at once, and comes home as a sum."""

    def _slice(self, brought: Counts) -> ChunkRoute:
        received = brought[:, :, self.place.rank]
        mine = brought[self.place.rank, self.shards.rank]
        return _route(mine, received.reshape(-1, received.shape[-1]))

    def _leg(self, rows: Counts) -> ChunkRoute:
        rank, copies = self.place.rank, self.shards.size
        sent = blocks(rows[rank, self.shards.rank])
        received = blocks(rows[:, :, rank])
        order = tuple(target for target in range(len(sent)) for _ in range(copies))
        splits = tuple(sent[target] for target in order)
        leg = Leg(Group.EXPERT_SHARDS if copies > 1 else Group.EXPERT, sent, order, splits, received)
        return ChunkRoute((), (), sent, received, (leg,))

    def _at_experts(self, brought: Counts, made: ChunkRoute) -> ChunkRoute:
        del brought
        return made


class RepeatedRoutes(ShardRouteMaker):
    """DeepSpeed-MoE's routes: rows of all shards lie together, by target and inside a target by shard."""

    def _slice(self, brought: Counts) -> ChunkRoute:
        together = brought.sum(axis=1)
        return _route(together[self.place.rank], together[:, self.place.rank])

    def _leg(self, rows: Counts) -> ChunkRoute:
        plane, rank = rows.sum(axis=1), self.place.rank
        legs = self.dispatch.legs(plane, self.place) if self.place.ep_size > 1 else ()
        return ChunkRoute((), (), blocks(plane[rank]), blocks(plane[:, rank]), legs)

    def _at_experts(self, brought: Counts, made: ChunkRoute) -> ChunkRoute:
        return _received(made, brought[:, :, self.place.rank])


def _route(sent: Counts, received: Counts) -> ChunkRoute:
    """Make a route from the rows to each target and from each source, by expert, [P, N]."""
    return ChunkRoute(
        sent.tolist(), received.tolist(), blocks(sent.sum(axis=-1)), blocks(received.sum(axis=-1))
    )


def _received(made: ChunkRoute, sources: Counts) -> ChunkRoute:
    """Return the slice `made` with rows from `sources`, [.., .., N], in their order."""
    by_source = sources.reshape(-1, sources.shape[-1])
    return replace(made, received=by_source.tolist(), rows_received=blocks(by_source.sum(axis=-1)))


def _pieces(rows: Counts, chunks: int) -> Sequence[Counts]:
    """Return the rows of every chunk, from a table by slice [P, S, P, C]."""
    cut = rows.reshape(*rows.shape[:-1], chunks, -1).sum(axis=-1)
    return [cut[..., chunk] for chunk in range(chunks)]
