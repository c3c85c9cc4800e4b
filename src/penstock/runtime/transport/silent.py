"""A transport that sends nothing: the same computation without a network, to measure it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from penstock.mesh import Axes, Group, Mesh
from penstock.runtime.lanes import Lanes, StreamLanes, ThreadLanes
from penstock.runtime.stack import Machinery
from penstock.runtime.transport import Transports, Unconnected


class SilentTransport(Unconnected):
    """Every rank gets rows of the right number, made of its own. Values are wrong, sizes and work are right.

    Only for routing with a fixed capacity: exchanged counts would be wrong, too.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def all_to_all(
        self,
        rows: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        group: Axes = Group.EXPERT,
    ) -> Tensor:
        del group
        assert sum(input_splits) == sum(output_splits), "only even routing can be imitated"
        return rows.clone()  # a receive buffer would be allocated and filled, too

    def all_gather(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        del group
        copies = -(-sum(sizes) // max(1, len(rows)))
        return rows.repeat(copies, *[1] * (rows.dim() - 1))[: sum(sizes)]

    def size(self, group: Axes) -> int:
        return self._mesh.size(group)


def silent(machinery: Machinery) -> Machinery:
    """The same machine with a transport that sends nothing, and lanes of its own."""
    transport = SilentTransport(machinery.layout.mesh)
    lanes: Lanes = ThreadLanes(transport.abort)
    if machinery.device.type == "cuda":
        lanes = StreamLanes(machinery.device, transport.abort)
    return replace(machinery, transports=Transports(transport, transport), lanes=lanes)
