"""What every dispatch is: a few all-to-alls, one after the other, each on the lane that it uses.

A leg sends blocks of rows in another sequence than they lie in; then come its splits. Combine is the same
legs backwards: splits swapped, blocks put back. So an algorithm is only ever written for one direction.
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
    """Where a rank stands in its expert group: ranks of a node are consecutive."""

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
        """Place inside the node."""
        return place_in_node(self.rank, self.node_size)


def place_in(axes: Axes, place: Place) -> int:
    """Which member of a leg's group the rank at `place` is."""
    return {Group.EXPERT: place.rank, Group.NODE: place.local, Group.RAIL: place.node}[axes]


@dataclass(frozen=True)
class Leg:
    """One all-to-all of one rank, in rows.

    axes: along which the splits count members. sizes: blocks as they lie. order: which block is sent when
    (indices into sizes); one that is sent several times comes home as the sum of all. input_splits,
    output_splits: rows to and from each member.
    """

    axes: Axes
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]

    @property
    def sorted_already(self) -> bool:
        """Whether the blocks lie as they are sent, so that nothing has to be copied."""
        held = [block for block in self.order if self.sizes[block]]
        return held == sorted(set(held))


class Dispatch(Protocol):
    """Brings rows, sorted by target rank, to those ranks, where they lie sorted by source rank.

    name: what a configuration calls it. hops: its legs as tasks, forward; combine takes them back.
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
        """The legs of the rank at `place`; `table` says how many rows go from whom to whom."""
        ...


def blocks(sizes: Sequence[int] | npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Plain integers, flattened."""
    return tuple(int(size) for size in np.asarray(sizes).reshape(-1))
