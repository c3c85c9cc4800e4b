"""A transport that sends nothing: the same computation without a network, to measure it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from penstock.mesh import Group
from penstock.runtime.lanes import Lanes, StreamLanes, ThreadLanes
from penstock.runtime.stack import Machinery
from penstock.runtime.transport import Transports, Unconnected


class SilentTransport(Unconnected):
    """Every rank gets rows of the right number, made of its own. Values are wrong, sizes and work are right.

    Only for routing with a fixed capacity: exchanged counts would be wrong, too.
    """

    def __init__(self, sizes: dict[Group, int]) -> None:
        self._sizes = sizes

    def all_to_all(
        self,
        rows: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        group: Group = Group.EXPERT,
    ) -> Tensor:
        del group
        assert sum(input_splits) == sum(output_splits), "only even routing can be imitated"
        return rows.clone()  # a receive buffer would be allocated and filled, too

    def size(self, group: Group) -> int:
        return self._sizes[group]


def silent(machinery: Machinery) -> Machinery:
    """The same machine with a transport that sends nothing, and lanes of its own."""
    layout = machinery.layout
    sizes = {
        Group.WORLD: layout.world_size,
        Group.EXPERT: layout.ep_size,
        Group.EXPERT_REPLICAS: layout.edp_size,
        Group.NODE: layout.ep_node_size,
        Group.RAIL: layout.ep_nodes,
    }
    transport = SilentTransport(sizes)
    lanes: Lanes = ThreadLanes(transport.abort)
    if machinery.device.type == "cuda":
        lanes = StreamLanes(machinery.device, transport.abort)
    return replace(machinery, transports=Transports(transport, transport), lanes=lanes)
