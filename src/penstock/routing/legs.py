"""Legs of a dispatch: a few all-to-alls, one after the other, each on the lane that it uses.

A leg sends blocks of rows in another sequence than they are stored in, given by `order`; then come its
splits. Combine is the same legs backwards: splits swapped, blocks put back. So an algorithm is only ever
written for one direction.

A dispatch that is written as the ranks where its rows stop (`Stops`) gets its legs from here. Which rows pass
a rank depends on the plan alone and is worked out once: O(P G) numbers for a rank.
Shapes: P ranks of an expert group, N nodes of G ranks each, B blocks on a rank, C pieces (slices or chunks).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from penstock.apportion import Counts
from penstock.mesh import Axes, Group, node_of, num_nodes, place_in_node
from penstock.ops.core import Hop

Table = Counts
"""[P, P]: rows from each rank (first index) for each rank (second)."""
RowsAt = Callable[[Counts, Counts], Counts]
"""Returns the rows of some pairs of source and target, [B, C]."""


@dataclass(frozen=True)
class Place:
    """Place of a rank in its expert group, where ranks of a node are consecutive."""

    rank: int
    ep_size: int
    node_size: int

    @property
    def nodes(self) -> int:
        """Nodes that the expert group covers."""
        return num_nodes(self.ep_size, self.node_size)

    @property
    def node(self) -> int:
        return node_of(self.rank, self.node_size)

    @property
    def local(self) -> int:
        """Place of the rank inside its node."""
        return place_in_node(self.rank, self.node_size)


def place_in(axes: Axes, place: Place) -> int:
    """Return the number of the rank at `place` among the members of a leg's group."""
    return {Group.EXPERT: place.rank, Group.NODE: place.local, Group.RAIL: place.node}[axes]


@dataclass(frozen=True)
class Leg:
    """One all-to-all of one rank, in rows.

    Attributes:
        axes: The axes along which the splits count members.
        sizes: The sizes of the blocks as they are stored.
        order: The block that is sent at every turn (indices into sizes); a block that is sent several times
            comes home as the sum of all copies.
        input_splits: The rows to each member.
        output_splits: The rows from each member.
    """

    axes: Axes
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]

    @cached_property
    def sorted_already(self) -> bool:
        """Whether blocks are stored in the order in which they are sent, so that nothing has to be copied."""
        held = [block for block in self.order if self.sizes[block]]
        return held == sorted(set(held))


class Dispatch(Protocol):
    """Brings rows, sorted by target rank, to those ranks, where they are sorted by source rank.

    Attributes:
        name: What a configuration calls it.
        hops: Its legs as tasks, forward; combine reverses them.
        needs_table: Whether it needs several nodes, and a rank must know what the others send to each other,
            not only its own share.
        joins_rows: Whether a row is for all of its token's experts in a node.
    """

    @property
    def name(self) -> str: ...

    @property
    def hops(self) -> tuple[Hop, ...]: ...

    @property
    def needs_table(self) -> bool: ...

    @property
    def joins_rows(self) -> bool: ...

    def __hash__(self) -> int: ...

    def legs(self, table: Table, place: Place) -> tuple[Leg, ...]:
        """Return the legs of the rank at `place`; `table` gives the rows from each rank to each rank."""
        ...


class Stops(ABC):
    """A dispatch that is written as the ranks where a row stops, leg by leg."""

    name: ClassVar[str]
    hops: ClassVar[tuple[Hop, ...]]
    needs_table: ClassVar[bool] = True
    joins_rows: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def stops(source: Any, target: Any, size: int) -> tuple[Any, ...]:
        """Return the ranks that have a row after every leg, the last of which is its target.

        Every stop is in the node of a row's source or in that of its target.

        Args:
            source: The ranks where rows start, [B].
            target: The ranks that rows are for, [B].
            size: The ranks of a node.
        """

    def legs(self, table: Table, place: Place) -> tuple[Leg, ...]:
        return legs_of(self, place, lambda source, target: table[source, target][:, None], (1,))[1][0]


def summed(rows_BC: Counts, chunks: int) -> Counts:
    """Return the rows of `chunks` chunks, each a run of as many pieces, [B, chunks]."""
    *blocks, pieces = rows_BC.shape
    if chunks == pieces:
        return rows_BC
    cut: Counts = rows_BC.reshape(*blocks, chunks, pieces // chunks).sum(axis=-1)
    return cut


def legs_of(
    dispatch: Dispatch, place: Place, rows_at: RowsAt, degrees: tuple[int, ...]
) -> dict[int, tuple[tuple[Leg, ...], ...]]:
    """Return the legs of the rank at `place`, by number of chunks and chunk.

    Args:
        dispatch: The dispatch; a custom one that is not written as stops gets a whole table for every chunk.
        place: The place of the rank.
        rows_at: Returns rows by piece. It is asked only for pairs that pass this rank.
        degrees: The numbers of chunks, each a divisor of the number of pieces.
    """
    if isinstance(dispatch, Stops):
        paths = [path.cut(rows_at, degrees) for path in _paths(dispatch, place)]
        return {n: tuple(zip(*(cuts[n] for cuts in paths), strict=True)) for n in degrees}
    every = np.indices((place.ep_size,) * 2).reshape(2, -1)
    tables = {n: summed(rows_at(*every), n).T.reshape(n, *(place.ep_size,) * 2) for n in degrees}
    return {n: tuple(dispatch.legs(table, place) for table in tables[n]) for n in degrees}


def busier_rows(dispatch: Dispatch, number: int, table: Table, node_size: int) -> Counts:
    """Return the rows that every rank sends to others in a leg or gets from them, whichever are more, [P].

    Args:
        number: The number of the leg, from 0.
        table: The rows from each rank to each rank.
    """
    ranks = len(table)
    if isinstance(dispatch, Stops):
        senders, receivers = _ways(dispatch, ranks, node_size)[number]
        rows = np.where(senders == receivers, 0, table.reshape(-1))
        by_way = [np.bincount(each, rows, ranks) for each in (senders, receivers)]
        return np.maximum(*by_way).astype(np.int64)
    busier = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        place = Place(rank, ranks, node_size)
        leg = dispatch.legs(table, place)[number]
        own = place_in(leg.axes, place)
        busier[rank] = max(sum(s) - s[own] for s in (leg.input_splits, leg.output_splits))
    return busier


class _Path(NamedTuple):
    """What passes a rank in one leg: pairs of source and target as they are stored, and where they go.

    Attributes:
        held: Sources and targets of what the rank sends, [B] each.
        order: The block that is sent first, second, and so on.
        to: The member that gets each block, [B].
        came: Sources and targets of what the rank receives.
        by: The member that sends each of these.
        members: Number of members.
    """

    axes: Axes
    held: tuple[Counts, Counts]
    order: tuple[int, ...]
    to: Counts
    came: tuple[Counts, Counts]
    by: Counts
    members: int

    def cut(self, rows_at: RowsAt, degrees: tuple[int, ...]) -> Mapping[int, list[Leg]]:
        """Return the legs by number of chunks and chunk."""
        sent_BC, came_BC = rows_at(*self.held), rows_at(*self.came)
        legs: dict[int, list[Leg]] = {}
        for chunks in degrees:
            pieces = zip(summed(sent_BC, chunks).T, summed(came_BC, chunks).T, strict=True)
            legs[chunks] = [
                Leg(
                    self.axes,
                    tuple(sent.tolist()),
                    self.order,
                    self._splits(self.to, sent),
                    self._splits(self.by, came),
                )
                for sent, came in pieces
            ]
        return legs

    def _splits(self, members: Counts, rows: Counts) -> tuple[int, ...]:
        return tuple(np.bincount(members, rows, self.members).astype(np.int64).tolist())


@lru_cache(maxsize=64)
def _paths(dispatch: Stops, place: Place) -> tuple[_Path, ...]:
    """Return what passes the rank at `place`, leg by leg. Rows that pass it start or end in its node."""
    size, ranks = place.node_size, np.arange(place.ep_size)
    here = node_of(ranks, size) == place.node
    near, far = ranks[here], ranks[~here]
    source = np.concatenate([np.repeat(near, len(ranks)), np.repeat(far, size)])
    target = np.concatenate([np.tile(ranks, size), np.tile(near, len(far))])
    stops = [source, *dispatch.stops(source, target, size)]
    paths = []
    for number, hop in enumerate(dispatch.hops):
        numbers = {
            Group.EXPERT: ranks,
            Group.NODE: place_in_node(ranks, size),
            Group.RAIL: node_of(ranks, size),
        }
        member, members = numbers[hop.axes], int(numbers[hop.axes].max()) + 1
        # What has come lies by sender, and inside by where it lay at the sender.
        stored = np.lexsort((target, *stops[:number]))
        sent = stored[stops[number][stored] == place.rank]
        came = np.flatnonzero(stops[number + 1] == place.rank)
        to = member[stops[number + 1][sent]]
        paths.append(
            _Path(
                hop.axes,
                (source[sent], target[sent]),
                tuple(np.argsort(to, kind="stable").tolist()),
                to,
                (source[came], target[came]),
                member[stops[number][came]],
                members,
            )
        )
    return tuple(paths)


@lru_cache(maxsize=16)
def _ways(dispatch: Stops, ranks: int, node_size: int) -> tuple[tuple[Counts, Counts], ...]:
    """Return the senders and receivers of all pairs in every leg, [P * P] each."""
    source, target = np.indices((ranks, ranks)).reshape(2, -1)
    stops = [source, *dispatch.stops(source, target, node_size)]
    return tuple(pairwise(stops))
