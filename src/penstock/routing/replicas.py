"""Rows of experts that several ranks have: which position gets how many.

Where ranks know all counts of the step, the split is even. They tell each other how many rows they have for
every expert before a row travels. From these counts each finds the same split: rows are computed where they
start as far as a rank then computes no more than its share, next in their node, and the rest goes to the
homes that have least to do. Integers only: what ranks find must not depend on how a library adds.

Shapes: S sources (the ranks that share an expert, rank by rank), P ranks, C slices, E experts, J those with
several homes, Q positions of an expert group, N positions of a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from penstock.apportion import Counts
from penstock.mesh import Group, Mesh, node_of
from penstock.placement import EMPTY, SPLIT, Replication
from penstock.routing.sizes import Ints


def rows_by_position(rows_PE: Counts, replication: Replication, mesh: Mesh) -> Counts:
    """Return the rows of one piece by position instead of by expert, [P, Q]. No row is lost."""
    if replication.limit is not None:
        nodes = tuple(node_of(rank, mesh.local_size) for rank in range(mesh.ep_size))
        split, sources = ExactSplit.of(replication, nodes), mesh.ep_size * mesh.etp_size
        groups = rows_PE.reshape(-1, sources, 1, rows_PE.shape[1])
        return np.concatenate([split.table(rows_SCE) for rows_SCE in groups]).reshape(len(rows_PE), -1)
    pairs, by_position = replication.pairs, np.zeros((len(rows_PE), replication.positions), np.int64)
    place_P = np.array([mesh.place(rank, Group.EXPERT) for rank in range(mesh.world_size)])
    for place in range(mesh.ep_size):
        here, own = np.flatnonzero(place_P == place), pairs.of(place)
        expert, position, before, upto = (each[own] for each in pairs[1:])
        rows_PK = rows_PE[here][:, expert]
        np.add.at(by_position, (here[:, None], position), rows_PK * upto // SPLIT - rows_PK * before // SPLIT)
    return by_position


MOST_PASSED = 8
"""The most times per rank that rows are passed on: half as many were always enough."""


class _Shared(NamedTuple):
    """An expert with several homes. homes: ranks, ascending. inside: by node with homes, the places of these
    homes, the first of the node's ranks, and the one after the last."""

    expert: int
    homes: tuple[int, ...]
    positions: tuple[int, ...]
    inside: tuple[tuple[tuple[int, ...], int, int], ...]


@dataclass(frozen=True)
class ExactSplit:
    """Which rank computes whose rows.

    Attributes:
        by_position: The expert at every position, or EMPTY.
        nodes: The node of every rank, ascending.
        limit: The most that a rank computes, if homes allow it, in SPLITths of the mean.
    """

    by_position: tuple[int, ...]
    nodes: tuple[int, ...]
    limit: int

    @staticmethod
    def of(replication: Replication, nodes: Sequence[int] = ()) -> ExactSplit:
        """Return the split of a replication that has a limit.

        Args:
            nodes: The node of every rank; () = all are in one node.
        """
        assert replication.limit is not None, "a replication without a limit says itself where rows go"
        one = (0,) * replication.placement.ranks
        return ExactSplit(replication.by_position, tuple(nodes) or one, replication.limit)

    @property
    def slots(self) -> int:
        """Positions of a rank."""
        return len(self.by_position) // len(self.nodes)

    def table(self, counts_SCE: Ints) -> Ints:
        """Return rows from every source to every position, [S, P, C, N].

        Args:
            counts_SCE: The rows of every source, by slice and expert.
        """
        counts_SCE = counts_SCE.astype(np.int64, copy=False)
        sources, slices, _ = counts_SCE.shape
        rows_SCQ: Ints = counts_SCE[:, :, self._expert_Q] * self._alone_Q
        if self._shared:
            left_CJS = counts_SCE[:, :, [each.expert for each in self._shared]].transpose(1, 2, 0)
            by_rank = left_CJS.reshape(*left_CJS.shape[:2], len(self.nodes), -1).sum(axis=3)
            fixed_CP = rows_SCQ.reshape(sources, slices, -1, self.slots).sum(axis=(0, 3))
            computed = map(self._levelled, fixed_CP.tolist(), by_rank.tolist())
            flows_CJSP = matched(left_CJS, np.array(list(computed)), tiers(self.nodes, sources))
            pairs = [(j, rank) for j, each in enumerate(self._shared) for rank in each.homes]
            experts, ranks = (list(each) for each in zip(*pairs, strict=True))
            at = [position for each in self._shared for position in each.positions]
            rows_SCQ[:, :, at] = flows_CJSP[:, experts, :, ranks].transpose(2, 1, 0)
        by_rank_SCPN = rows_SCQ.reshape(sources, slices, -1, self.slots)
        return by_rank_SCPN.transpose(0, 2, 1, 3)

    @cached_property
    def home(self) -> tuple[int, ...]:
        """Positions that hold an expert, in the order in which rows lie at home: by expert, then position."""
        held = self.by_position
        return tuple(
            sorted((q for q, expert in enumerate(held) if expert != EMPTY), key=lambda q: (held[q], q))
        )

    # ---- how many rows every home computes -----------------------------------------------------------------

    def _levelled(self, fixed: list[int], starting: list[list[int]]) -> list[list[int]]:
        """Return the rows of every shared expert by rank, [J][P]. fixed: rows of all other experts. starting:
        [J][P], where rows start."""
        load, totals = list(fixed), [sum(rows) for rows in starting]
        everything = sum(load) + sum(totals)
        most = -(-self.limit * everything // (SPLIT * len(load)))
        order = sorted(range(len(totals)), key=lambda j: -totals[j])
        given = [[0] * len(load) for _ in totals]
        for first in (True, False):  # the first round places rows where they start
            for j in order:
                homes, rows = self._shared[j].homes, given[j]
                if not first and all(load[home] <= most for home in homes):
                    continue
                for home in homes:
                    load[home] -= rows[home]
                near = [load[home] for home in homes]
                for home, count in zip(
                    homes,
                    _placed(self._shared[j], starting[j], near, everything if first else most),
                    strict=True,
                ):
                    rows[home] = count
                    load[home] += count
        self._relieve(given, load, most)
        return given

    def _relieve(self, given: list[list[int]], load: list[int], most: int) -> None:
        """Pass rows on from ranks that compute more than `most`, along chains of experts that ranks share."""
        full_ones = list(range(len(load)))
        for _ in range(MOST_PASSED * len(load)):
            full = max(full_ones, key=load.__getitem__, default=None)
            if full is None or load[full] <= most:
                return
            # The ranks that rows of `full` can reach, nearest first: by which rank, of which expert.
            reached, queue = {full: (full, -1)}, deque([full])
            while queue:
                rank = queue.popleft()
                for j in self._shared_by_rank[rank]:
                    for home in self._shared[j].homes if given[j][rank] else ():
                        if home not in reached:
                            reached[home] = rank, j
                            queue.append(home)
            least = min(reached, key=load.__getitem__)
            gap = load[full] - load[least]
            if gap < 2:  # then no rank on the way can give rows away, either
                full_ones = [rank for rank in full_ones if rank not in reached]
                continue
            steps, rank = [], least
            while rank != full:
                before, j = reached[rank]
                steps.append((j, before, rank))
                rank = before
            wanted = min(load[full] - most, most - load[least]) if load[least] < most else gap // 2
            rows = min(wanted, *(given[j][before] for j, before, _ in steps))
            for j, before, after in steps:
                given[j][before] -= rows
                given[j][after] += rows
            load[full] -= rows
            load[least] += rows

    # ---- what never changes --------------------------------------------------------------------------------

    @cached_property
    def _expert_Q(self) -> Ints:  # noqa: N802  # the suffix is its shape
        expert_Q: Ints = np.maximum(np.array(self.by_position), 0)
        return expert_Q

    @cached_property
    def _alone_Q(self) -> Ints:  # noqa: N802
        """1 where a position's expert has no other home."""
        held = self.by_position
        shared = {each.expert for each in self._shared}
        alone: Ints = np.array([expert != EMPTY and expert not in shared for expert in held], np.int64)
        return alone

    @cached_property
    def _shared(self) -> tuple[_Shared, ...]:
        positions: dict[int, list[int]] = {}
        for position, expert in enumerate(self.by_position):
            if expert != EMPTY:
                positions.setdefault(expert, []).append(position)
        shared = []
        for expert, held in sorted(positions.items()):
            if len(held) > 1:
                homes = tuple(position // self.slots for position in held)
                inside: dict[int, list[int]] = {}
                for place, home in enumerate(homes):
                    inside.setdefault(self.nodes[home], []).append(place)
                firsts = {node: self.nodes.index(node) for node in inside}
                ranges = (
                    (tuple(places), firsts[node], firsts[node] + self.nodes.count(node))
                    for node, places in inside.items()
                )
                shared.append(_Shared(expert, homes, tuple(held), tuple(ranges)))
        return tuple(shared)

    @cached_property
    def _shared_by_rank(self) -> list[list[int]]:
        """The shared experts that each rank holds."""
        ranks = range(len(self.nodes))
        return [[j for j, each in enumerate(self._shared) if rank in each.homes] for rank in ranks]


def filled(heights: Sequence[int], rows: int) -> list[int]:
    """Return the rows that each place gets if the lowest fill up first.

    Args:
        heights: The rows that places have.
        rows: The rows to be shared out.
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    left, count, level = rows, 0, 0
    for count, place in enumerate(order, start=1):
        following = heights[order[count]] if count < len(order) else None
        level = heights[place]
        if following is None or (following - level) * count >= left:
            break
        left -= (following - level) * count
    share, more = divmod(left, count)
    added = [0] * len(heights)
    for turn, place in enumerate(order[:count]):
        added[place] = level - heights[place] + share + (turn < more)
    return added


def _placed(expert: _Shared, starting: Sequence[int], load: list[int], most: int) -> list[int]:
    """Return an expert's rows by home. load: the homes' other rows. most: a limit if others have room."""
    left = sum(starting)
    by_home = [
        min(starting[home], max(0, most - base)) for home, base in zip(expert.homes, load, strict=True)
    ]
    left -= sum(by_home)
    for places, first, last in expert.inside if left else ():
        heights = [load[place] + by_home[place] for place in places]
        room = sum(max(0, most - height) for height in heights)
        rest = sum(starting[first:last]) - sum(by_home[place] for place in places)
        if rows := min(rest, room):
            left -= rows
            for place, more in zip(places, filled(heights, rows), strict=True):
                by_home[place] += more
    if left:
        heights = [base + rows for base, rows in zip(load, by_home, strict=True)]
        by_home = [rows + more for rows, more in zip(by_home, filled(heights, left), strict=True)]
    return by_home


# ---- whose rows --------------------------------------------------------------------------------------------


class Tier(NamedTuple):
    """Groups of near sources and ranks.

    Attributes:
        first_S, first_P: The first source, and the first rank, of each one's group.
        together_SP: 1 where a source and a rank are in one group.
    """

    first_S: Ints
    first_P: Ints
    together_SP: Ints


@lru_cache(maxsize=16)
def tiers(nodes: tuple[int, ...], sources: int = 0) -> tuple[Tier, ...]:
    """Return tiers, nearest first: ranks, nodes, all.

    Args:
        nodes: The node of every rank, ascending.
        sources: The number of sources; 0 = the ranks.
    """
    ranks, per_rank = np.arange(len(nodes)), (sources or len(nodes)) // len(nodes)
    groups = [(np.repeat(group, per_rank), group) for group in (ranks, np.array(nodes), 0 * ranks)]
    return tuple(
        Tier(
            np.searchsorted(of_source, of_source),
            np.searchsorted(of_rank, of_rank),
            (of_source[:, None] == of_rank).astype(np.int64),
        )
        for of_source, of_rank in groups
    )


def matched(left_CJS: Ints, room_CJP: Ints, near: Sequence[Tier]) -> Ints:
    """Return rows from every source to every rank, [C, J, S, P], matched inside ever larger groups.

    Few ranks have room for an expert: O(C J S H) numbers are worked out, with H the ranks that do, up to
    twice as many.

    Args:
        left_CJS: The rows of every source that have no rank yet.
        room_CJP: The rows that every rank takes.
        near: The groups, the nearest first.
    """
    all_CJPS = np.zeros((*room_CJP.shape, left_CJS.shape[2]), np.int64)  # memory of few ranks is touched
    has_room_JP = room_CJP.max(axis=0) > 0
    sizes_J = has_room_JP.sum(axis=1)
    bits_J = np.array([size.bit_length() for size in sizes_J.tolist()])
    for bits in np.unique(bits_J):
        of_size = np.flatnonzero(bits_J == bits)
        most = int(sizes_J[of_size].max())
        # As many more as fill a row have no room.
        rank_JH = np.argsort(~has_room_JP[of_size], axis=1, kind="stable")[:, :most]
        left, room = left_CJS[:, of_size], room_CJP[:, of_size]  # copies
        flows_CJSH = np.zeros((*left.shape, most), np.int64)
        experts_J1 = np.arange(len(rank_JH))[:, None]
        for first_S, first_P, together_SP in near:
            starts_CJS, ends_CJS = _runs(left, first_S)
            starts_CJH, ends_CJH = (each[:, experts_J1, rank_JH] for each in _runs(room, first_P))
            overlap = np.minimum(ends_CJS[..., None], ends_CJH[:, :, None])
            overlap -= np.maximum(starts_CJS[..., None], starts_CJH[:, :, None])
            np.maximum(overlap, 0, out=overlap)
            overlap *= together_SP[:, rank_JH].transpose(1, 0, 2)
            flows_CJSH += overlap
            left = left - overlap.sum(axis=3)
            room[:, experts_J1, rank_JH] -= overlap.sum(axis=2)
        for expert, flows_CSH, rank_H in zip(of_size, flows_CJSH.swapaxes(0, 1), rank_JH, strict=True):
            all_CJPS[:, expert][:, rank_H] = flows_CSH.swapaxes(1, 2)
    return all_CJPS.swapaxes(2, 3)


def _runs(sizes: Ints, first: Ints) -> tuple[Ints, Ints]:
    """Return where runs of these sizes begin and end; in each group they follow one another."""
    ends = sizes.cumsum(axis=2)
    starts = ends - sizes
    before = starts[..., first]
    return starts - before, ends - before
