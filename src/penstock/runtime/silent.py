"""A transport that sends nothing: the same computation without a network, to measure it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from penstock.mesh import Axes, Group, Mesh
from penstock.runtime.lanes import build_lanes
from penstock.runtime.machinery import Machinery
from penstock.runtime.transport import Transports, Unconnected
from penstock.runtime.transport.sums import scattered_in_order


class SilentTransport(Unconnected):
    """Gives every rank rows of the right number, made from its own. Values are wrong, sizes and work are
    right.

    Only for routing with a fixed capacity: exchanged counts would be wrong, too.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh, self._rank = mesh, rank

    def all_to_all(
        self,
        rows: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        group: Axes = Group.EXPERT,
    ) -> Tensor:
        del input_splits, group
        return _of_length(rows, sum(output_splits))

    def all_gather(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        del group
        return _of_length(rows, sum(sizes))

    def reduce_scatter(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        return scattered_in_order(rows, sizes, group, self)

    def size(self, group: Axes) -> int:
        return self._mesh.size(group)

    def place(self, group: Axes) -> int:
        return self._mesh.place(self._rank, group)


def _of_length(rows: Tensor, length: int) -> Tensor:
    """Return a copy, cut or repeated to that length, since a receive buffer would be made and filled, too."""
    if not len(rows):
        return rows.new_zeros(length, *rows.shape[1:])
    copies = -(-length // len(rows))
    return rows.repeat(max(1, copies), *[1] * (rows.dim() - 1))[:length]


def silent(machinery: Machinery) -> Machinery:
    """Return the same machinery with a transport that sends nothing, and lanes of its own."""
    transport = SilentTransport(machinery.layout.mesh, machinery.layout.rank)
    lanes = build_lanes(machinery.device, transport.abort, alone=True)
    return replace(machinery, transports=Transports(transport, transport, sends=False), lanes=lanes)
