"""The interface of dispatches: a few all-to-alls, one after the other, each on the lane that it uses.

A leg sends blocks of rows in another sequence than they are stored in, given by `order`; then come its
splits. Combine is the same legs backwards: splits swapped, blocks put back. So an algorithm is only ever
written for one direction.
Shapes: P ranks of an expert group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.mesh import Axes, Group, node_of, num_nodes, place_in_node
from penstock.ops.transfers import Hop

Table = npt.NDArray[np.int64]
"""[P, P]: rows from each rank (first index) for each rank (second)."""


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

    axes: along which the splits count members. sizes: blocks as they are stored. order: which block is sent
    when (indices into sizes); a block that is sent several times comes home as the sum of all copies.
    input_splits, output_splits: rows to and from each member.
    """

    axes: Axes
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]

    @property
    def sorted_already(self) -> bool:
        """Whether blocks are stored in the order in which they are sent, so that nothing has to be copied."""
        held = [block for block in self.order if self.sizes[block]]
        return held == sorted(set(held))


class Dispatch(Protocol):
    """Brings rows, sorted by target rank, to those ranks, where they are sorted by source rank.

    name: what a configuration calls it. hops: its legs as tasks, forward; combine reverses them.
    needs_table: whether it needs several nodes, and a rank must know what the others send to each other, not
    only its own share. joins_rows: whether a row is for all of its token's experts in a node.
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


def blocks(sizes: Sequence[int] | npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Return sizes as plain integers, flattened."""
    return tuple(int(size) for size in np.asarray(sizes).reshape(-1))
