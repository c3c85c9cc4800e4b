"""The description of an emulated cluster: its number of nodes and devices, and the rates of its links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

from penstock.config import ConfigError, Within, check_bounds

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

    inter_rate_bit_per_s: of a node's one uplink, in each direction; its devices share it, as they share a
    network card. intra_rate_bit_per_s: of each device's link to its node, in each direction. Up to 5 Gbit/s
    a link has exactly its rate; beyond, the processors of this machine may be the limit.

    mtu_bytes: the largest packet, without its Ethernet header; 9000 are the jumbo frames of cluster networks,
    of which headers take 0.7 %, 1500 is the default of a link (4.4 %).
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
    """Return the shape of `2x4`: two nodes of four devices. Raises `ConfigError` about `key`."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*[xX]\s*(\d{1,6})\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(key, text, "must be NODESxDEVICES", "For example 2x4: two nodes of four devices.")
    return Shape(nodes=int(match[1]), devices=int(match[2]))


def parse_rate(text: str, key: str = "rate") -> float:
    """Return the bits per second of `700mbit`, in decimal units. Raises `ConfigError` about `key`."""
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
