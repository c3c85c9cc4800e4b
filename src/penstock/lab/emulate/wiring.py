"""Which namespaces and links a cluster has. Names and addresses only: nothing here touches the kernel.

    rank 0  net0 ==== device0 [node 0: bridge0] uplink ---- node0 [core: bridge0] node1 ---- uplink [node 1...
    rank 1  net0 ==== device1

Every box is a network namespace; `====` has the intra rate and `----` the inter rate, in both directions.
Devices of one node meet at their own bridge, so their traffic never reaches the uplink. The namespace of the
machine itself gets no link, bridge or address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Final

from penstock.lab.emulate.config import Shape
from penstock.mesh import node_of, place_in_node

NETWORK: Final = IPv4Network("198.18.0.0/15")
"""Reserved for benchmarks (RFC 2544), so no network of the machine uses these addresses.

All clusters use the same addresses: what is in one namespace is invisible in others.
"""

INTERFACE: Final = "net0"
BRIDGE: Final = "bridge0"
UPLINK: Final = "uplink"


@dataclass(frozen=True, kw_only=True)
class Port:
    """One end of a link: what leaves through it has the link's rate."""

    namespace: str
    interface: str


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The parts of the cluster `name`."""

    name: str
    shape: Shape

    @property
    def ranks(self) -> tuple[str, ...]:
        """Namespaces of the devices, by rank."""
        return tuple(self.rank(rank) for rank in range(self.shape.ranks))

    @property
    def switches(self) -> tuple[str, ...]:
        """Namespaces of the nodes' bridges, by node."""
        return tuple(f"{self.name}-n{node}" for node in range(self.shape.nodes))

    @property
    def core(self) -> str:
        """Namespace of the bridge that joins the nodes."""
        return f"{self.name}-core"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces of the cluster."""
        return (*self.ranks, *self.switches, self.core)

    def rank(self, rank: int) -> str:
        """Return the namespace of a device. Raises ValueError for a rank that does not exist."""
        if not 0 <= rank < self.shape.ranks:
            raise ValueError(f"rank {rank}: {self.shape} has ranks 0 to {self.shape.ranks - 1}")
        return f"{self.name}-n{node_of(rank, self.shape.devices)}d{place_in_node(rank, self.shape.devices)}"

    def node(self, node: int) -> int:
        """Return `node` itself. Raises ValueError if there is no such node."""
        if not 0 <= node < self.shape.nodes:
            raise ValueError(f"node {node}: {self.shape} has nodes 0 to {self.shape.nodes - 1}")
        return node

    def address(self, rank: int) -> str:
        """Return the address of a device; rank 0 has the first one."""
        self.rank(rank)
        return str(NETWORK[rank + 1])

    def device_link(self, rank: int) -> tuple[Port, Port]:
        """Return both ends of the link from a device to its node's bridge: the device's, and the bridge's."""
        switch = self.switches[node_of(rank, self.shape.devices)]
        return (
            Port(namespace=self.rank(rank), interface=INTERFACE),
            Port(namespace=switch, interface=f"device{place_in_node(rank, self.shape.devices)}"),
        )

    def uplink(self, node: int) -> tuple[Port, Port]:
        """Return both ends of a node's uplink: the node's (it sends), and the core's (it receives)."""
        return (
            Port(namespace=self.switches[self.node(node)], interface=UPLINK),
            Port(namespace=self.core, interface=f"node{node}"),
        )

    def device_links(self) -> Iterator[tuple[Port, Port]]:
        """Return the device links of all ranks, in order."""
        return (self.device_link(rank) for rank in range(self.shape.ranks))

    def uplinks(self) -> Iterator[tuple[Port, Port]]:
        """Return the uplinks of all nodes, in order."""
        return (self.uplink(node) for node in range(self.shape.nodes))
