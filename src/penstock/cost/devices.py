"""Devices by name, as their data sheets have them. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

Computing = Literal["float32", "bfloat16"]
"""The precision of matrix products, and of activations in memory and on the wire."""

Link = Literal["NVLink", "Infinity Fabric", "PCIe", "PCIe through the host"]
"""What joins the devices of a node. Through the host: devices do not reach each other's memory."""

Architecture = Literal[
    "Pascal", "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell", "Grace Blackwell", "CDNA 3", "CDNA 4"
]
"""What devices with alike kernels have in common."""


@dataclass(frozen=True)
class Device:
    """A device by its data sheet; operations are dense, with sums in float32.

    Attributes:
        name: As its maker gives it.
        float32_tflops: 1e12 operations per second.
        bfloat16_tflops: None where the device has no such units; PyTorch then emulates them slowly.
        memory_gb: 1e9 bytes, for each size that is sold; the largest is taken where a name says none.
        memory_gb_per_s: Read or written, in 1e9 bytes per second.
        link: To others of its node.
        link_gb_per_s: Of that link, in one direction.
        units: That compute tiles of products, each by itself.
        architecture: Of these units.
    """

    name: str
    float32_tflops: float
    bfloat16_tflops: float | None = None
    memory_gb: tuple[int, ...] = ()
    memory_gb_per_s: float = 0.0
    link: Link = "PCIe"
    link_gb_per_s: float = 0.0
    units: int = 0
    architecture: Architecture = "Ampere"

    @property
    def usual(self) -> Computing:
        """The precision that `train.precision=auto` means on it."""
        return "float32" if self.bfloat16_tflops is None else "bfloat16"

    def peak_tflops(self, precision: Computing) -> float | None:
        """Return the rate of products in a precision; None where it has no units for it."""
        return self.float32_tflops if precision == "float32" else self.bfloat16_tflops


CPU = "cpu"

DEVICES = (
    Device("P100", 10.6, None, (16,), 732, "NVLink", 80, 56, "Pascal"),
    Device("V100", 15.7, None, (16, 32), 900, "NVLink", 150, 80, "Volta"),
    Device("T4", 8.1, None, (16,), 320, "PCIe", 16, 40, "Turing"),
    Device("RTX 2080 Ti", 13.4, None, (11,), 616, "PCIe through the host", 16, 68, "Turing"),
    Device("TITAN RTX", 16.3, None, (24,), 672, "PCIe through the host", 16, 72, "Turing"),
    Device("Quadro RTX 8000", 16.3, None, (48,), 672, "PCIe", 16, 72, "Turing"),
    Device("A100", 19.5, 312.0, (40, 80), 2039, "NVLink", 300, 108, "Ampere"),
    Device("A800", 19.5, 312.0, (40, 80), 2039, "NVLink", 200, 108, "Ampere"),
    Device("A10", 31.2, 125.0, (24,), 600, "PCIe", 32, 72, "Ampere"),
    Device("A10G", 31.2, 70.0, (24,), 600, "PCIe", 32, 80, "Ampere"),
    Device("A30", 10.3, 165.0, (24,), 933, "PCIe", 32, 56, "Ampere"),
    Device("A40", 37.4, 149.7, (48,), 696, "PCIe", 32, 84, "Ampere"),
    Device("RTX A6000", 38.7, 154.8, (48,), 768, "PCIe", 32, 84, "Ampere"),
    Device("RTX 3090", 35.6, 71.0, (24,), 936, "PCIe through the host", 32, 82, "Ampere"),
    Device("RTX 4090", 82.6, 165.2, (24,), 1008, "PCIe through the host", 32, 128, "Ada"),
    Device("RTX 5090", 104.8, 209.5, (32,), 1792, "PCIe through the host", 64, 170, "Ada"),
    Device("L4", 30.3, 121.0, (24,), 300, "PCIe", 32, 58, "Ada"),
    Device("L40S", 91.6, 362.0, (48,), 864, "PCIe", 32, 142, "Ada"),
    Device("H20", 44.0, 148.0, (96, 141), 4000, "NVLink", 450, 78, "Hopper"),
    Device("H100 PCIe", 51.0, 756.0, (80,), 2000, "PCIe", 64, 114, "Hopper"),
    Device("H100", 67.0, 989.0, (80,), 3350, "NVLink", 450, 132, "Hopper"),
    Device("H800", 67.0, 989.0, (80,), 3350, "NVLink", 200, 132, "Hopper"),
    Device("H200", 67.0, 989.0, (141,), 4800, "NVLink", 450, 132, "Hopper"),
    Device("GH200", 67.0, 989.0, (96, 144), 4000, "NVLink", 450, 132, "Hopper"),
    Device("B200", 80.0, 2250.0, (180,), 8000, "NVLink", 900, 148, "Blackwell"),
    Device("GB200", 80.0, 2500.0, (186,), 8000, "NVLink", 900, 148, "Grace Blackwell"),
    Device("B300", 77.0, 2250.0, (288,), 8000, "NVLink", 900, 148, "Blackwell"),
    Device("GB300", 83.0, 2500.0, (288,), 8000, "NVLink", 900, 148, "Grace Blackwell"),
    Device("DGX Spark", 31.0, 125.0, (128,), 273, "PCIe", 64, 48, "Ada"),
    Device("MI300X", 163.4, 1307.4, (192,), 5300, "Infinity Fabric", 448, 304, "CDNA 3"),
    Device("MI325X", 163.4, 1307.4, (256,), 6000, "Infinity Fabric", 448, 304, "CDNA 3"),
    Device("MI355X", 157.3, 2516.6, (288,), 8000, "Infinity Fabric", 537, 256, "CDNA 4"),
)
"""Devices by the names that their makers give them, with their makers' data sheets' numbers."""


@cache
def find_device(name: str) -> Device | None:
    """Return the device of which a name speaks, such as `NVIDIA H100 80GB HBM3`; None = unknown."""
    found = [each for each in DEVICES if _is_in(name, each.name)]
    return max(found, key=lambda each: len(each.name), default=None)


def _is_in(name: str, device: str) -> bool:
    """Return whether the words of `device` stand in `name`, with or without spaces between them."""
    words = r"[\s_-]*".join(map(re.escape, device.lower().split()))
    return re.search(rf"(?<![a-z0-9]){words}(?![a-z0-9])", name.lower()) is not None
