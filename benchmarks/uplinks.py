"""The links between nodes: what they allow, and how tables speak of them and of sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Uplinks:
    """The links between nodes.

    Attributes:
        devices: Devices of a node, which share its uplink.
        inter_rate_bit_per_s: The rate in each direction; None if not known.
    """

    nodes: int
    devices: int
    inter_rate_bit_per_s: float | None

    def limit_s(self, wire_bytes: int) -> float | None:
        """Return the least seconds of a call that sends `wire_bytes` over an uplink, if known."""
        if self.inter_rate_bit_per_s is None or wire_bytes == 0:
            return None
        return wire_bytes * 8 / self.inter_rate_bit_per_s


def cluster_text(ranks: int, nodes: int, inter_rate_bit_per_s: float | None) -> str:
    """Return a text such as `4 ranks on 2 nodes, 400 Mbit/s between nodes`."""
    rate = inter_rate_bit_per_s
    link = "link rate not known" if rate is None else f"{rate / 1e6:.0f} Mbit/s between nodes"
    return f"{ranks} ranks on {nodes} nodes, {link}"


def size_text(size_bytes: int) -> str:
    """Return a text such as `64 KiB`, `4 MiB`."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"
