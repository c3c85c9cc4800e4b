"""The clusters of the papers: their devices and links, and what is assumed of the class of each.

A belief is a middle and a factor: the value lies within that factor of the middle in two of three cases.
Bandwidths and operations are believed as shares of what the papers and data sheets say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.cost.devices import Device, find_device


@dataclass(frozen=True)
class Belief:
    """What is thought of a constant before any task is looked at.

    Attributes:
        why: The reason in words.
    """

    middle: float
    factor: float
    why: str


@dataclass(frozen=True)
class Links:
    """A class of links: the start-up of a message over one, and the share of its rate that is reached."""

    start_s: Belief
    share: Belief


INSIDE: Final = {
    "NVLink": Links(Belief(8e-6, 1.5, "NCCL over NVLink"), Belief(0.8, 1.2, "NCCL over NVLink")),
    "PCIe switch": Links(Belief(1e-5, 1.5, "NCCL over PCIe"), Belief(0.7, 1.4, "two devices on a switch")),
    "PCIe": Links(
        Belief(1.5e-5, 1.5, "NCCL through the memory of the host"),
        Belief(0.25, 2.0, "devices that do not reach each other's memory and share the host's"),
    ),
}
BETWEEN: Final = {
    "InfiniBand": Links(Belief(1.5e-5, 1.5, "NCCL over InfiniBand"), Belief(0.85, 1.2, "of a card")),
    "Ethernet": Links(Belief(3e-5, 1.5, "NCCL over sockets"), Belief(0.8, 1.3, "of a card over sockets")),
}
PRODUCTS: Final = Belief(0.5, 1.7, "products in float32")
TASK_S: Final = Belief(1e-4, 1.5, "a dozen kernels that PyTorch launches one by one")
COPIES: Final = 0.5
"""Share of the memory's rate in copies: each byte is read and written."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster as its paper describes it.

    Attributes:
        inside, between: Class of the links in a node and between nodes, and their bytes per second as
            published; a class "" between nodes = one node.
        starts: Known start-ups in seconds, by constant.
        like: The cluster that lends what it reaches of its own rates, as far as `lent` says; "" = none.
        why_like: Why that cluster.
    """

    title: str
    device: str
    nodes: int
    per_node: int
    memory_gib: int
    inside: tuple[str, float]
    between: tuple[str, float]
    published: str
    starts: tuple[tuple[str, float], ...] = ()
    like: str = ""
    lent: tuple[str, ...] = ()
    why_like: str = ""

    @property
    def sheet(self) -> Device:
        """The device's data sheet."""
        device = find_device(self.device)
        assert device is not None, self.device
        return device

    def wholes(self) -> dict[str, float]:
        """Return what shares are of, by rate."""
        return {
            "flops_per_s": self.sheet.float32_tflops * 1e12,
            "link_bytes_per_s": self.between[1],
            "intra_bytes_per_s": self.inside[1],
        }

    def beliefs(self) -> dict[str, Belief]:
        """Return beliefs by rate; shares of a whole where there is one."""
        inside = INSIDE[self.inside[0]]
        between = BETWEEN.get(self.between[0], inside)
        return {
            "flops_per_s": PRODUCTS,
            "task_overhead_s": TASK_S,
            "link_latency_s": between.start_s,
            "link_bytes_per_s": between.share,
            "intra_latency_s": inside.start_s,
            "intra_bytes_per_s": inside.share,
        }


GBIT: Final = 1e9 / 8
PCIE3, PCIE4 = 15.75e9, 31.5e9
ALL: Final = ("flops_per_s", "task_overhead_s", "link_bytes_per_s", "intra_latency_s", "intra_bytes_per_s")
RTX_3090 = "the same devices on the same links, as FlowMoE's cluster 1 has them"

HARDWARE: Final = {
    "flowmoe-cluster-1": Hardware(
        title="FlowMoE, cluster 1: 2 nodes of 8 x RTX3090",
        device="RTX 3090",
        nodes=2,
        per_node=8,
        memory_gib=24,
        inside=("PCIe", PCIE3),
        between=("InfiniBand", 100 * GBIT),
        published="100 Gb/s (12.5 GB/s) between nodes, PCIe 3.0 x16 (15.75 GB/s) inside",
    ),
    "flowmoe-cluster-2": Hardware(
        title="FlowMoE, cluster 2: 4 nodes of 2 x RTX2080Ti",
        device="RTX 2080 Ti",
        nodes=4,
        per_node=2,
        memory_gib=12,
        inside=("PCIe switch", PCIE3),
        between=("Ethernet", 10 * GBIT),
        published="10 Gb/s (1.25 GB/s) between nodes, a PCIe switch (PCIe 3.0 x16, 15.75 GB/s) inside",
        like="flowmoe-cluster-1",
        lent=("flops_per_s", "task_overhead_s"),
        why_like="the same programs",
    ),
    "fsmoe-testbed-a": Hardware(
        title="FSMoE, testbed A: 6 nodes of 8 x RTX A6000",
        device="RTX A6000",
        nodes=6,
        per_node=8,
        memory_gib=48,
        inside=("PCIe", PCIE4),
        between=("InfiniBand", 200 * GBIT),
        published="200 Gb/s between nodes; NVLink with 112.5 GB/s in pairs, PCIe 4.0 x16 (31.5 GB/s) inside",
        starts=(
            ("task_overhead_s", 4.26e-5),
            ("link_latency_s", 2.87e-4 / 5),
            ("intra_latency_s", 3.37e-4 / 7),
        ),
    ),
    "fsmoe-testbed-b": Hardware(
        title="FSMoE, testbed B: 8 nodes of 4 x RTX2080Ti",
        device="RTX 2080 Ti",
        nodes=8,
        per_node=4,
        memory_gib=11,
        inside=("PCIe", PCIE3),
        between=("InfiniBand", 100 * GBIT),
        published="100 Gb/s between nodes, PCIe 3.0 x16 (15.75 GB/s) inside",
        starts=(
            ("task_overhead_s", 9.24e-5),
            ("link_latency_s", 1.75e-4 / 7),
            ("intra_latency_s", 3.2e-5 / 3),
        ),
    ),
    "netmoe-a800": Hardware(
        title="NetMoE, cluster A800: 4 nodes of 8 x A800",
        device="A800",
        nodes=4,
        per_node=8,
        memory_gib=40,
        inside=("NVLink", 200e9),
        between=("InfiniBand", 100e9),
        published="100 GB/s InfiniBand between nodes, NVLink with 400 GB/s (200 GB/s each way) inside",
    ),
    "parm-testbed-a": Hardware(
        title="Parm, cluster testbed A: 1 node of 8 x RTX4090",
        device="RTX 4090",
        nodes=1,
        per_node=8,
        memory_gib=24,
        inside=("PCIe", PCIE4),
        between=("", PCIE4),
        published="PCIe 4.0 x16 (31.5 GB/s) inside; no second node: the link between nodes is the one inside",
    ),
    "parm-testbed-b": Hardware(
        title="Parm, cluster testbed B: 8 nodes of 4 x RTX2080Ti",
        device="RTX 2080 Ti",
        nodes=8,
        per_node=4,
        memory_gib=11,
        inside=("PCIe", PCIE3),
        between=("InfiniBand", 100 * GBIT),
        published="100 Gb/s between nodes, PCIe 3.0 x16 (15.75 GB/s) inside",
        like="fsmoe-testbed-b",
        lent=(*ALL, "link_latency_s"),
        why_like="FSMoE's testbed B is described in the same words",
    ),
    "pro-prophet-hpnv": Hardware(
        title="Pro-Prophet, cluster HPNV: 4 nodes of 4 x RTX3090",
        device="RTX 3090",
        nodes=4,
        per_node=4,
        memory_gib=24,
        inside=("PCIe", PCIE3),
        between=("InfiniBand", 100 * GBIT),
        published="100 Gb/s InfiniBand between nodes; PCIe 3.0 (15.75 GB/s), which holds up collectives of "
        "four, and NVLink 3 in pairs inside",
        like="flowmoe-cluster-1",
        lent=ALL,
        why_like=RTX_3090,
    ),
    "pro-prophet-hpwnv": Hardware(
        title="Pro-Prophet, cluster HPWNV: 4 nodes of 4 x RTX3090 (the paper uses 8 nodes, too)",
        device="RTX 3090",
        nodes=4,
        per_node=4,
        memory_gib=24,
        inside=("PCIe", PCIE3),
        between=("InfiniBand", 100 * GBIT),
        published="100 Gb/s InfiniBand between nodes, PCIe 3.0 x16 (15.75 GB/s) inside",
        like="flowmoe-cluster-1",
        lent=ALL,
        why_like=RTX_3090,
    ),
    "pro-prophet-lpwnv": Hardware(
        title="Pro-Prophet, cluster LPWNV: 2 nodes of 4 x RTX2080Ti",
        device="RTX 2080 Ti",
        nodes=2,
        per_node=4,
        memory_gib=11,
        inside=("PCIe", PCIE3),
        between=("InfiniBand", 100 * GBIT),
        published="100 Gb/s InfiniBand between nodes, PCIe 3.0 x16 (15.75 GB/s) inside",
        like="fsmoe-testbed-b",
        lent=ALL,
        why_like="the same devices on the same links, as FSMoE's testbed B has them",
    ),
}
"""Every cluster of a paper that comes with Penstock. A800s have 40 GB at 1,555 GB/s there."""
