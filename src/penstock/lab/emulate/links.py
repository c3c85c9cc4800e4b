"""Which namespaces and links a cluster has, and the links' creation, rates and counters.

    rank 0  net0 ==== device0 [node 0: bridge0] uplink ---- node0 [core: bridge0] node1 ---- uplink [node 1...
    rank 1  net0 ==== device1

Every box is a network namespace; `====` has the intra rate and `----` the inter rate, in both directions.
Devices of one node meet at their own bridge, so their traffic never reaches the uplink. The namespace of the
machine itself gets no link, bridge or address. All that is known about a link is read from the kernel.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network
from typing import Annotated, Any, Final

from penstock.config import ConfigError, Within, check_bounds
from penstock.lab.emulate.system import command, ip, tc
from penstock.mesh import node_of, place_in_node

UNITS_BIT_PER_S: Final = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3, "bit": 1.0}
"""Units of rates, the largest first, as `format_rate` tries them."""

SLOWEST_BIT_PER_S: Final = 1e5
"""The kernel keeps the time that a full bucket needs in 32 bits, which overflows a little below this rate."""

FASTEST_BIT_PER_S: Final = 1e11
"""Far beyond what one machine can move: near this rate a limit has no effect."""

SMALLEST_MTU_BYTES: Final = 576
LARGEST_MTU_BYTES: Final = 9000

MOST_RANKS: Final = 256
"""Each rank is a process of this machine; a bridge takes 1023 ports, and addresses suffice for 131,000."""


Devices = Annotated[int, Within(1, MOST_RANKS, "each rank is a process of this machine", hint="Try 2x4.")]
PacketBytes = Annotated[int, Within(SMALLEST_MTU_BYTES, LARGEST_MTU_BYTES, "links carry no other packets")]
Rate = Annotated[float, Within(SLOWEST_BIT_PER_S, FASTEST_BIT_PER_S, "the kernel limits no other rates")]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`nodes` nodes of `devices` devices each; ranks are numbered node by node."""

    nodes: Devices
    devices: Devices

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.ranks > MOST_RANKS:
            why = f"is {self.ranks} devices, and one machine emulates at most {MOST_RANKS}"
            raise ConfigError("shape", str(self), why, "For example 2x4.")

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices}"


@dataclass(frozen=True, kw_only=True)
class EmulateConfig:
    """A cluster to emulate.

    Attributes:
        nodes: Number of nodes.
        devices: Number of devices in each node.
        inter_rate_bit_per_s: Rate of a node's one uplink, in each direction; its devices share it, as they
            share a network card.
        intra_rate_bit_per_s: Rate of each device's link to its node, in each direction. Up to 5 Gbit/s a link
            has exactly its rate; beyond, the processors of this machine may be the limit.
        mtu_bytes: The largest packet, without its Ethernet header; 9000 are the jumbo frames of cluster
            networks, of which headers take 0.7 %, 1500 is the default of a link (4.4 %).
    """

    nodes: Devices
    devices: Devices
    inter_rate_bit_per_s: Rate = 1e9
    intra_rate_bit_per_s: Rate = 8e9
    mtu_bytes: PacketBytes = 9000

    def __post_init__(self) -> None:  # as check_bounds, but with the units and names of options
        Shape(nodes=self.nodes, devices=self.devices)
        for key in ("inter_rate_bit_per_s", "intra_rate_bit_per_s"):
            check_rate(getattr(self, key), key)
        if not SMALLEST_MTU_BYTES <= self.mtu_bytes <= LARGEST_MTU_BYTES:
            why = f"must be from {SMALLEST_MTU_BYTES} to {LARGEST_MTU_BYTES} bytes"
            raise ConfigError("--mtu", self.mtu_bytes, why, "Use 9000 or 1500.")

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.shape.ranks

    @property
    def shape(self) -> Shape:
        """The nodes and devices alone."""
        return Shape(nodes=self.nodes, devices=self.devices)


def parse_shape(text: str, key: str = "shape") -> Shape:
    """Return the shape of `2x4`: two nodes of four devices.

    Raises:
        ConfigError: About `key`, if the text is no shape.
    """
    match = re.fullmatch(r"\s*(\d{1,6})\s*[xX]\s*(\d{1,6})\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(key, text, "must be NODESxDEVICES", "For example 2x4: two nodes of four devices.")
    return Shape(nodes=int(match[1]), devices=int(match[2]))


def parse_rate(text: str, key: str = "rate") -> float:
    """Return the bits per second of `700mbit`, in decimal units.

    Raises:
        ConfigError: About `key`, if the text is no rate.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?bit)\s*", text.lower(), re.ASCII)
    if match is None:
        hint = "For example 700mbit or 2.5gbit."
        raise ConfigError(key, text, "must be a number with bit, kbit, mbit or gbit (per second)", hint)
    rate_bit_per_s = float(match[1]) * UNITS_BIT_PER_S[match[2]]
    check_rate(rate_bit_per_s, key, text)
    return rate_bit_per_s


def check_rate(rate_bit_per_s: float, key: str, shown: object = None) -> None:
    """Raise `ConfigError` for a rate that no link can have."""
    if not SLOWEST_BIT_PER_S <= rate_bit_per_s <= FASTEST_BIT_PER_S:
        why = f"must be from {format_rate(SLOWEST_BIT_PER_S)} to {format_rate(FASTEST_BIT_PER_S)}"
        raise ConfigError(key, shown or rate_bit_per_s, why, "For example 700mbit.")


def format_rate(rate_bit_per_s: float) -> str:
    """Return `700mbit` for 7e8: the inverse of `parse_rate`, to six digits."""
    unit = next((u for u, size in UNITS_BIT_PER_S.items() if rate_bit_per_s >= size), "bit")
    return f"{rate_bit_per_s / UNITS_BIT_PER_S[unit]:.6g}{unit}"


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
        """Return the namespace of a device.

        Raises:
            ValueError: If there is no such rank.
        """
        if not 0 <= rank < self.shape.ranks:
            raise ValueError(f"rank {rank}: {self.shape} has ranks 0 to {self.shape.ranks - 1}")
        return f"{self.name}-n{node_of(rank, self.shape.devices)}d{place_in_node(rank, self.shape.devices)}"

    def node(self, node: int) -> int:
        """Return `node` itself.

        Raises:
            ValueError: If there is no such node.
        """
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


LEAST_BURST_BYTES: Final = 160 * 1024
"""The least size of a bucket. Under about 128 kB the kernel cuts every offloaded packet of 64 kB into single
packets before it lets them pass, which costs so much processor time that computation beside the traffic slows
down by half."""

BURST_S: Final = 1e-3
"""Seconds of its rate that an idle link lets pass at once, unlike real links: just enough to reach the rate.

One millisecond is enough for the kernel's timers; with a fixed 512 kB, a transfer of 2 MiB at 400 Mbit/s
would be a quarter faster than the link.
"""

QUEUE_MS: Final = 50
"""How long a packet may wait before it is dropped. With this, TCP keeps a link busy, alone or with others."""


@dataclass(frozen=True, kw_only=True)
class UplinkBytes:
    """Bytes that have crossed a node's uplink since it was created, headers included."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, kw_only=True)
class Uplink(UplinkBytes):
    """The state of a node's uplink."""

    node: int
    rate_bit_per_s: float
    is_up: bool


def build(wiring: Wiring, mtu_bytes: int) -> None:
    """Create bridges, links and addresses in namespaces that exist and have nothing but `lo`."""
    for namespace in (*wiring.switches, wiring.core):
        ip(namespace, ("link set dev lo up", f"link add name {BRIDGE} type bridge", f"link set {BRIDGE} up"))
    for rank, (device, port) in enumerate(wiring.device_links()):
        address = f"address add {wiring.address(rank)}/{NETWORK.prefixlen} dev {INTERFACE}"
        ip(
            device.namespace,
            ("link set dev lo up", _pair(device, port, mtu_bytes), address, f"link set {INTERFACE} up"),
        )
        ip(port.namespace, _join_bridge(port))
    for uplink, port in wiring.uplinks():
        ip(uplink.namespace, (_pair(uplink, port, mtu_bytes), *_join_bridge(uplink)))
        ip(port.namespace, _join_bridge(port))


def _pair(here: Port, there: Port, mtu_bytes: int) -> str:
    peer = f"peer name {there.interface} netns {there.namespace} mtu {mtu_bytes}"
    return f"link add name {here.interface} mtu {mtu_bytes} type veth {peer}"


def _join_bridge(port: Port) -> tuple[str, ...]:
    return (f"link set dev {port.interface} master {BRIDGE}", f"link set dev {port.interface} up")


def set_rate(ports: Iterable[Port], rate_bit_per_s: float, *, verb: str = "change") -> None:
    """Limit what leaves through each port; costs one process per namespace.

    Args:
        verb: `add` for ports that have no limit yet; `change` keeps queued packets and the counters.
    """
    bucket = max(LEAST_BURST_BYTES, round(rate_bit_per_s / 8 * BURST_S))
    shape = f"root tbf rate {round(rate_bit_per_s)}bit burst {bucket} latency {QUEUE_MS}ms"
    lines = defaultdict(list)
    for port in ports:
        lines[port.namespace].append(f"qdisc {verb} dev {port.interface} {shape}")
    for namespace, of_namespace in lines.items():
        tc(namespace, of_namespace)


def set_up(port: Port, *, up: bool) -> None:
    """Take a link down, or up again. Its rate and its counters stay; queued packets are lost."""
    ip(port.namespace, (f"link set dev {port.interface} {'up' if up else 'down'}",))


def read_uplinks(wiring: Wiring) -> tuple[Uplink, ...]:
    """Return the state of every uplink. Costs two processes per node, a few milliseconds each."""
    uplinks = []
    bytes_of = read_bytes(wiring)
    for node, (own, _) in enumerate(wiring.uplinks()):
        rate_bit_per_s = 8.0 * _tbf(own.namespace)[own.interface]["options"]["rate"]
        link = json.loads(command("ip", "-netns", own.namespace, "-json", "link", "show", own.interface))
        is_up = "UP" in link[0]["flags"]
        crossed = asdict(bytes_of[node])
        uplinks.append(Uplink(node=node, rate_bit_per_s=rate_bit_per_s, is_up=is_up, **crossed))
    return tuple(uplinks)


def read_bytes(wiring: Wiring) -> tuple[UplinkBytes, ...]:
    """Return the bytes that have crossed every uplink, by node. Costs one process per node and one more.

    They are counted where the rate is enforced. The counters of the interfaces would miss most headers: they
    count one for a packet of 64 kB that is cut into 45 on a real wire.
    """
    core = _tbf(wiring.core)
    return tuple(
        UplinkBytes(
            sent_bytes=_tbf(own.namespace)[own.interface]["bytes"],
            received_bytes=core[port.interface]["bytes"],
        )
        for own, port in wiring.uplinks()
    )


def _tbf(namespace: str) -> dict[str, Any]:
    """Return what `tc` says about the limits in a namespace, by interface."""
    every = json.loads(command("tc", "-netns", namespace, "-statistics", "-json", "qdisc", "show"))
    return {each["dev"]: each for each in every if each["kind"] == "tbf"}
