"""Numbers of rows for every target: sizes that dispatch, experts and combine share, integers on the host.

Counts are known by slice, rows travel by chunk: a chunk, forward or backward, is a run of whole slices. A
position is a slot for an expert; a rank's counts for a rank are one for each of its positions, and where an
order sends fewer rows than expert inputs, the rows they stand for.

A rank works on what it sends and what it receives: O(P C N) numbers; in a dispatch through other ranks also
on what passes its node, O(P G C N). Only what ranks gather, where `RouteMaker.needs_table`, has every rank's
counts.

One microbatch in one layer, on one of 1,024 ranks with one expert each, nodes of 8, with 4 slices and chunks
of one and of two: 0.7 ms and 1.0 MB (flat), 0.8 ms and 0.9 MB (hierarchical_2d), 4.2 ms and 1.8 MB on the
first rank of a node (hierarchical_1d), 15 ms and 10 MB with 16,384 rows (node_once). On 256 ranks these are
0.2, 0.2, 0.8 and 3.4 ms. `tests/routing/test_replicas.py` holds the memory.

Shapes: P ranks of the expert group, H ranks that share every expert, C slices (the chunks of a plan of an
order), N counts per rank and slice. A source is a rank of the expert group, or its place there and its shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from penstock.apportion import Counts
from penstock.mesh import Group, Mesh
from penstock.routing.joined import arrivals, filled_blocks, joined_legs, num_sets
from penstock.routing.legs import Dispatch, Leg, Place, RowsAt, legs_of, summed
from penstock.routing.replicas import ExactSplit
from penstock.step.shape import ExpertForm

Degrees = tuple[int, ...]
"""The numbers of chunks in which rows of an MoE layer travel; each divides the number of slices."""
Legs = tuple[Leg, ...]

FIXED_KEPT = 512
"""Routes of fixed sizes that are kept: those of some hundred layers, in training and in evaluation."""


class GroupSizes(tuple[int, ...]):
    """Rows of every expert. One object serves all products: `ends` keeps what a device has of it."""

    ends: Any = None


@dataclass(frozen=True)
class ChunkRoute:
    """Sizes of one slice on one rank.

    Attributes:
        sent: The inputs for each expert of each rank, [P][local experts].
        received: The inputs from each source for each of this rank's experts.
        rows_sent: The rows by target: the blocks in which they leave.
        rows_received: The rows by source: the blocks in which they arrive.
        legs: The transfers; none if alone, or for a slice that never travels by itself.
    """

    sent: Sequence[Sequence[int]]
    received: Sequence[Sequence[int]]
    rows_sent: tuple[int, ...]
    rows_received: tuple[int, ...]
    legs: Legs = ()

    @cached_property
    def rows_per_expert(self) -> GroupSizes:
        """Number of inputs of each local expert."""
        return GroupSizes(sum(column) for column in zip(*self.received, strict=True))


@dataclass(frozen=True)
class Shares:
    """One slice on ranks that share experts or attention, in rows.

    Attributes:
        peers: The rows that each rank sharing this one's experts brings to them.
        blocks: The own rows and those of each such rank, by target rank, [rank][target].
        counts: This rank's rows by position, before they are dealt.
    """

    peers: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Routes:
    """Sizes of all slices of one microbatch in one layer, and of the chunks in which they travel.

    Attributes:
        slices: The slices as rows travel between ranks.
        cuts: The legs by number of chunks and chunk.
        at_experts: The slices as experts get them, where they differ from those that arrive from other nodes.
        shares: The shares of every slice, where ranks share experts.
        home: The positions in the order in which a slice's rows lie at home; () = by position, as they leave.
    """

    slices: tuple[ChunkRoute, ...]
    cuts: Mapping[int, tuple[Legs, ...]]
    at_experts: tuple[ChunkRoute, ...] = ()
    shares: tuple[Shares, ...] = ()
    home: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.at_experts:
            object.__setattr__(self, "at_experts", self.slices)


@dataclass(frozen=True)
class ShardPlace:
    """How rows meet all shards of their experts, and the place of a rank among those that share its experts.

    Attributes:
        form: How rows meet the shards. With "gather" (FSMoE) every shard has its own rows between nodes, and
            experts get them shard by shard. With "s1" and "s2" (Parm) a row goes to every shard of its expert
            at once, and comes home as a sum. With "baseline" (DeepSpeed-MoE) rows of all shards lie together,
            by target and inside it by shard.
        size: The number of shards of every expert.
        rank: The shard that this rank has.
        dealt: The ranks that have the same rows and deal them, 1 = none.
        turns: The turn in which every rank of the expert group is dealt rows, [P][H].
    """

    form: ExpertForm = "gather"
    size: int = 1
    rank: int = 0
    dealt: int = 1
    turns: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(form: ExpertForm, mesh: Mesh, rank: int) -> ShardPlace | None:
        """Return the place of a rank of the world; None where no rank shares its experts or rows."""
        tp_size, etp_size = mesh.tp_size, mesh.etp_size
        if etp_size == 1 and (tp_size == 1 or form not in ("s2", "baseline")):
            return None
        turns = [mesh.place(member, Group.TENSOR) for member in mesh.members(rank, Group.EXPERT_SHARDS)]
        by_place = tuple(tuple(turns[i : i + etp_size]) for i in range(0, len(turns), etp_size))
        dealt = tp_size if form == "s2" else 1
        return ShardPlace(form, etp_size, mesh.place(rank, Group.SHARDS), dealt, by_place)


def in_turn(rows: Counts, turn: Counts | int, shares: int) -> Counts:
    """Return the number of rows that one turn gets when rows are dealt to `shares` turns, counted from 0."""
    share: Counts = (rows - turn + shares - 1) // shares
    return share


@dataclass(frozen=True)
class RouteMaker:
    """Turns counts into routes on one rank.

    Attributes:
        dispatch: How rows travel.
        place: The place of the rank in its expert group.
        row_counts: Whether the last counts are numbers of rows. Where a dispatch joins rows, these are one
            for every set of places in the target's node; no rank needs others' counts then.
        shards: How rows meet the shards of their experts; None = experts are whole.
        split: What splits rows among the homes of their expert by the counts of all ranks, which are then by
            expert; None = counts are by position.
    """

    dispatch: Dispatch
    place: Place
    row_counts: bool = False
    shards: ShardPlace | None = None
    split: ExactSplit | None = None

    @property
    def joins(self) -> bool:
        """Whether blocks of rows are for a node and a set of places in it."""
        return self.row_counts and self.dispatch.joins_rows and self.place.ep_size > 1

    @cached_property
    def leg_of(self) -> Mapping[str, int]:
        """The number of the leg that an op takes, out or home."""
        return {op: n for n, hop in enumerate(self.dispatch.hops) for op in (hop.op, hop.home.op)}

    @property
    def needs_table(self) -> bool:
        """Whether a rank must know what the others send to each other, not only its own share."""
        return bool(self.shards or self.split) or (self.dispatch.needs_table and not self.joins)

    def from_pair(self, sent_PCN: Counts, received_PCN: Counts, degrees: Degrees | None = None) -> Routes:
        """Make routes from what this rank sends and receives, which is enough for a flat dispatch.

        Args:
            sent_PCN, received_PCN: The counts for every rank, and from every rank.
            degrees: The numbers of chunks in which rows travel; None = every slice is a chunk.
        """
        if self.joins:
            return self._joined(sent_PCN, received_PCN, degrees)
        rank, sent_PC, came_PC = self.place.rank, self._rows(sent_PCN), self._rows(received_PCN)

        def rows_at(source: Counts, target: Counts) -> Counts:
            leaves, comes = source == rank, target == rank
            if leaves.all():
                return sent_PC[target]
            if comes.all():
                return came_PC[source]
            # Of other pairs nothing is known.
            return np.where(leaves[:, None], sent_PC[target], came_PC[source] * comes[:, None])

        return self._routes(sent_PCN, received_PCN, (sent_PC.T, came_PC.T), rows_at, degrees)

    def from_everyone(self, counts_SCX: Counts, degrees: Degrees | None = None) -> Routes:
        """Make routes from the counts of all ranks concerned: by slice, X = N counts per rank, by rank."""
        if self.split is not None:
            routes = self.from_table(self.split.table(counts_SCX), degrees)
            return replace(routes, home=self.split.home)
        by_rank_SCPN = counts_SCX.reshape(*counts_SCX.shape[:2], self.place.ep_size, -1)
        return self.from_table(by_rank_SCPN.transpose(0, 2, 1, 3), degrees)

    def from_table(self, table_SPCN: Counts, degrees: Degrees | None = None) -> Routes:
        """Make routes from what every source sends to every rank."""
        if self.shards is not None:
            return self._shared(self.shards, table_SPCN, degrees)
        rank = self.place.rank
        sent_PCN, received_PCN = table_SPCN[rank], table_SPCN[:, rank]
        if self.joins:
            return self._joined(sent_PCN, received_PCN, degrees)
        rows_at = lambda source, target: self._rows(table_SPCN[source, target])  # noqa: E731
        rows = self._rows(sent_PCN).T, self._rows(received_PCN).T
        return self._routes(sent_PCN, received_PCN, rows, rows_at, degrees)

    def _shared(self, shards: ShardPlace, table_SPCN: Counts, degrees: Degrees | None) -> Routes:
        """Make routes where ranks share experts, from what every rank brings to each, [P H, P, C, N]."""
        rank, ranks, shard, slices = self.place.rank, self.place.ep_size, shards.rank, table_SPCN.shape[2]
        brought = table_SPCN.reshape(ranks, shards.size, *table_SPCN.shape[1:])
        here_HPCN, came_PHCN = brought[rank], brought[:, :, rank]
        if shards.dealt > 1:  # every n-th row of an expert, by turns
            turns = np.asarray(shards.turns)[:, :, None, None]
            here_HPCN = in_turn(here_HPCN, turns[rank][..., None], shards.dealt)
            came_PHCN = in_turn(came_PHCN, turns, shards.dealt)
        at_experts = came_PHCN.reshape(-1, *came_PHCN.shape[2:])
        rows_at: RowsAt | None = None
        if shards.form == "baseline":
            sent, received = here_HPCN.sum(axis=0), came_PHCN.sum(axis=1)
            rows_at = lambda source, target: brought[source, :, target].sum(axis=(1, 3))  # noqa: E731
        elif shards.form == "gather":
            sent, received = here_HPCN[shard], came_PHCN[:, shard]
            rows_at = lambda source, target: brought[source, shard, target].sum(axis=-1)  # noqa: E731
            at_experts = came_PHCN.swapaxes(0, 1).reshape(at_experts.shape)
        else:
            sent, received = here_HPCN[shard], at_experts
        cuts = _alone(slices, degrees)
        if rows_at is None:
            fused = partial(_fused, sent.sum(axis=-1), received.sum(axis=-1), shards.size)
            cuts = {n: fused(n) for n in degrees or (slices,)}
        elif ranks > 1:
            cuts = legs_of(self.dispatch, self.place, rows_at, degrees or (slices,))
        peers_CH, blocks_CHP = came_PHCN.sum(axis=(0, 3)).T, np.moveaxis(here_HPCN.sum(axis=-1), 2, 0)
        counts = brought[rank, shard].swapaxes(0, 1).reshape(slices, -1)
        shares = tuple(
            Shares(tuple(peers), tuple(map(tuple, blocks)), tuple(own))
            for peers, blocks, own in zip(
                peers_CH.tolist(), blocks_CHP.tolist(), counts.tolist(), strict=True
            )
        )
        made, arrived = (
            _slices(sent, arriving, sent.sum(axis=-1).T, arriving.sum(axis=-1).T, cuts)
            for arriving in (received, at_experts)
        )
        return Routes(made, cuts, arrived, shares)

    def even(self, slots: Sequence[int], local_experts: int, degrees: Degrees | None = None) -> Routes:
        """Make routes of fixed sizes: every rank sends `slots[c]` rows to every expert in slice c.

        Args:
            local_experts: The number of experts of every rank.
            degrees: See `from_pair`.
        """
        counts_C1 = np.asarray(slots, dtype=np.int64)[:, None]
        return self.fixed(np.repeat(counts_C1, self.place.ep_size * local_experts, axis=1), degrees)

    def fixed(self, rows_CX: Counts, degrees: Degrees | None = None) -> Routes:
        """Make routes of fixed sizes: every rank sends as many rows to each position.

        The sizes are those of all microbatches, layers and steps, so their routes are made once.

        Args:
            rows_CX: The rows of every slice, X = all positions.
        """
        return _fixed(self, rows_CX.shape, rows_CX.tobytes(), degrees)

    def _rows(self, counts: Counts) -> Counts:
        rows: Counts = counts[..., -1] if self.row_counts else counts.sum(axis=-1)
        return rows

    def _routes(
        self,
        sent_PCN: Counts,
        received_PCN: Counts,
        rows: tuple[Counts, Counts],
        rows_at: RowsAt,
        degrees: Degrees | None,
    ) -> Routes:
        """Make routes of rows, [C, P] each, that are for one rank each."""
        slices = sent_PCN.shape[1]
        cuts = _alone(slices, degrees)
        if self.place.ep_size > 1:
            cuts = legs_of(self.dispatch, self.place, rows_at, degrees or (slices,))
        experts = slice(None, -1) if self.row_counts else slice(None)
        return Routes(_slices(sent_PCN[..., experts], received_PCN[..., experts], *rows, cuts), cuts)

    def _joined(self, sent_PCN: Counts, received_PCN: Counts, degrees: Degrees | None) -> Routes:
        """Make routes of rows for a node and a set of places in it: counts end with one for every set."""
        slices, size = sent_PCN.shape[1], self.place.node_size
        experts = sent_PCN.shape[2] - num_sets(size)
        sent_NSC = sent_PCN[::size, :, experts:].swapaxes(1, 2)  # all ranks of a node get the same counts
        came_PSC = received_PCN[:, :, experts:].swapaxes(1, 2)
        cuts = {
            n: tuple(joined_legs(summed(sent_NSC, n), summed(came_PSC, n), self.place))
            for n in degrees or (slices,)
        }
        rows = filled_blocks(sent_NSC), arrivals(came_PSC, self.place)
        return Routes(_slices(sent_PCN[..., :experts], received_PCN[..., :experts], *rows, cuts), cuts)


def _slices(
    sent_PCN: Counts,
    received_SCN: Counts,
    out_CB: Counts,
    in_CB: Counts,
    cuts: Mapping[int, tuple[Legs, ...]],
) -> tuple[ChunkRoute, ...]:
    """Return the routes of slices. out, in: the blocks of rows that leave and arrive."""
    slices = sent_PCN.shape[1]
    parts = (each.tolist() for each in (sent_PCN.swapaxes(0, 1), received_SCN.swapaxes(0, 1), out_CB, in_CB))
    legs = cuts.get(slices, ((),) * slices)
    return tuple(
        ChunkRoute(sent, received, tuple(out), tuple(came), own)
        for sent, received, out, came, own in zip(*parts, legs, strict=True)
    )


def _alone(slices: int, degrees: Degrees | None) -> dict[int, tuple[Legs, ...]]:
    """Return no legs for any chunk: nothing travels."""
    return {n: ((),) * n for n in degrees or (slices,)}


def _fused(sent_PC: Counts, received_SC: Counts, copies: int, chunks: int) -> tuple[Legs, ...]:
    """Return the leg of every chunk in which a row goes to all shards of its expert."""
    axes = Group.EXPERT_SHARDS if copies > 1 else Group.EXPERT
    order = tuple(np.repeat(np.arange(len(sent_PC)), copies).tolist())
    pieces = zip(summed(sent_PC, chunks).T, summed(received_SC, chunks).T, strict=True)
    return tuple(
        (Leg(axes, tuple(out.tolist()), order, tuple(np.repeat(out, copies).tolist()), tuple(came.tolist())),)
        for out, came in pieces
    )


@lru_cache(maxsize=FIXED_KEPT)
def _fixed(maker: RouteMaker, shape: tuple[int, ...], rows: bytes, degrees: Degrees | None) -> Routes:
    """Make routes of fixed sizes. rows: rows_CX of `RouteMaker.fixed` as bytes, which can be looked up."""
    rows_CX: Counts = np.frombuffer(rows, dtype=np.int64).reshape(shape)
    sources = maker.place.ep_size * (maker.shards.size if maker.shards else 1)
    brought_PCN = rows_CX.reshape(len(rows_CX), maker.place.ep_size, -1).transpose(1, 0, 2)
    return maker.from_table(np.broadcast_to(brought_PCN, (sources, *brought_PCN.shape)), degrees)
