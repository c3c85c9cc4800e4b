"""Devices by name: whether they multiply in bfloat16, and how fast in either precision. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Computing = Literal["float32", "bfloat16"]
"""The precision of matrix products, and of activations in memory and on the wire."""


@dataclass(frozen=True)
class Device:
    """Published rates of dense products in 1e12 operations per second, with sums in float32.

    bfloat16_tflops: None where the device has no such units; PyTorch then emulates them slowly.
    """

    name: str
    float32_tflops: float
    bfloat16_tflops: float | None = None

    @property
    def usual(self) -> Computing:
        """The precision that `train.precision=auto` means on it."""
        return "float32" if self.bfloat16_tflops is None else "bfloat16"

    def peak_tflops(self, precision: Computing) -> float | None:
        """Return the rate of products in a precision; None where it has no units for it."""
        return self.float32_tflops if precision == "float32" else self.bfloat16_tflops


CPU = "cpu"

DEVICES = (
    Device("P100", 10.6),
    Device("V100", 15.7),
    Device("T4", 8.1),
    Device("RTX 2080 Ti", 13.4),
    Device("TITAN RTX", 16.3),
    Device("Quadro RTX 8000", 16.3),
    Device("A100", 19.5, 312.0),
    Device("A800", 19.5, 312.0),
    Device("A10", 31.2, 125.0),
    Device("A10G", 31.2, 70.0),
    Device("A30", 10.3, 165.0),
    Device("A40", 37.4, 149.7),
    Device("RTX A6000", 38.7, 154.8),
    Device("RTX 3090", 35.6, 71.0),
    Device("RTX 4090", 82.6, 165.2),
    Device("L4", 30.3, 121.0),
    Device("L40S", 91.6, 362.0),
    Device("H20", 44.0, 148.0),
    Device("H100 PCIe", 51.0, 756.0),
    Device("H100", 67.0, 989.0),
    Device("H800", 67.0, 989.0),
    Device("H200", 67.0, 989.0),
    Device("GH200", 67.0, 989.0),
    Device("B200", 80.0, 2250.0),
)
"""GPUs by the names that their makers give them."""


def find_device(name: str) -> Device | None:
    """Return the GPU of which a name speaks, such as `NVIDIA H100 80GB HBM3` or `RTX3090`; None = unknown."""
    found = [each for each in DEVICES if _is_in(name, each.name)]
    return max(found, key=lambda each: len(each.name), default=None)


def _is_in(name: str, device: str) -> bool:
    """Return whether the words of `device` stand in `name`, with or without spaces between them."""
    words = r"[\s_-]*".join(map(re.escape, device.lower().split()))
    return re.search(rf"(?<![a-z0-9]){words}(?![a-z0-9])", name.lower()) is not None
