"""Devices by name, as their data sheets have them. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from typing import Any, Final, Literal

import numpy as np

from penstock.graph import Phase
from penstock.ops.work import Kernels

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
        name: Its name, as its maker gives it.
        float32_tflops: The peak in float32, in 1e12 operations per second.
        bfloat16_tflops: The peak in bfloat16; None where the device has no units for it, and PyTorch emulates
            them slowly.
        memory_gb: The sizes of memory that are sold, in 1e9 bytes; the largest is taken where a name says
            none.
        memory_gb_per_s: The rate of the memory, read or written, in 1e9 bytes per second.
        link: The link to others of its node.
        link_gb_per_s: The rate of that link in one direction, in 1e9 bytes per second.
        units: The number of units that compute tiles of products, each by itself.
        architecture: The architecture of these units.
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
    devices = []
    for each in DEVICES:  # whose words stand in the name, with or without spaces between them
        pattern = r"[\s_-]*".join(map(re.escape, each.name.lower().split()))
        if re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", name.lower()):
            devices.append(each)
    return max(devices, key=lambda each: len(each.name), default=None)


KEPT_BYTES, KEPT_SHARE = 2e9, 0.05
"""What contexts, communicators and fragmented memory take of a device: bytes, and a share of all."""


def usable_bytes(memory_gb: int) -> int:
    """Return what tensors may take of a device's memory, given in 1e9 bytes."""
    return int(memory_gb * 1e9 * (1 - KEPT_SHARE) - KEPT_BYTES)


# ---- how fast the kernels of a device are of which nothing but the data sheet is known --------------------
#
# A product is computed in tiles, one on each of a device's units at a time: rows that do not fill a tile, and
# the last wave of tiles, are lost, and every tile begins and ends. So an expert with few rows is slow. Large
# products reach a share of the peak that power and clocks leave, attention another, and everything else takes
# as long as its bytes in memory. No task is shorter than its kernels' starts.
#
# Sources of the shares, all of single kernels: cuBLAS in bfloat16 on A100 230 TFLOP/s (74 % of the data
# sheet; grouped products with 616 rows for each of 40 experts 65 %, with 1232 rows 70 %, gradients of weights
# 52 and 60 %), on H100 620 to 720 (63 to 73 %), on B200 1450 in short runs and 1100 once it is warm (49 %,
# gradients of weights 45 %, experts the same), as SimuMax has measured and published them by shape, and the
# makers' own benchmarks; hipBLASLt on MI300X 550 to 700, on MI355X 1400 to 1600. GeForce and workstation
# cards come near a peak that is halved for sums in float32. Attention with a causal mask, 4096 tokens and
# heads of 128, forward and backward: 560 and 430 TFLOP/s on H100 (FlashAttention 3, cuDNN), 170 and 130 on
# A100 (FlashAttention 2), 950 and 750 on B200, 400 and 290 on MI300X. Memory: 80 % of the rate is what copies
# reach on H100 and A100, 67 % is what norms and sums reach on B200. The rest are assumptions by likeness:
# Grace's boards have more power than a B200's, and older devices' libraries come nearer to a lower peak.


@dataclass(frozen=True)
class Shares:
    """The shares of a data sheet's rates that kernels reach.

    Attributes:
        products: The share of the peak that large products reach.
        scores, scores_backward: The share of the peak that scores of attention reach, forward and backward.
        memory: The share of the memory's rate.
    """

    products: float
    scores: float
    scores_backward: float
    memory: float

    @property
    def words(self) -> str:
        """The shares as text."""
        products, scores, backward, memory = (round(100 * share) for share in astuple(self))
        return f"products {products} %, attention {scores} and {backward}, memory {memory}"


SHARES: Final[dict[Architecture, Shares]] = {
    "Pascal": Shares(0.85, 0.30, 0.25, 0.75),
    "Volta": Shares(0.85, 0.30, 0.25, 0.80),
    "Turing": Shares(0.85, 0.30, 0.25, 0.80),
    "Ampere": Shares(0.77, 0.50, 0.42, 0.80),
    "Ada": Shares(0.78, 0.55, 0.45, 0.80),
    "Hopper": Shares(0.68, 0.55, 0.43, 0.80),
    "Blackwell": Shares(0.50, 0.43, 0.33, 0.70),
    "Grace Blackwell": Shares(0.58, 0.43, 0.33, 0.70),
    "CDNA 3": Shares(0.46, 0.30, 0.22, 0.70),
    "CDNA 4": Shares(0.55, 0.34, 0.25, 0.70),
}
"""By architecture."""

FLOAT8: Final = 1.7
"""Speed of products in float8, casts of what they multiply included, over that of the same in bfloat16."""

HAS_FLOAT8: Final = ("Ada", "Hopper", "Blackwell", "Grace Blackwell", "CDNA 3", "CDNA 4")
"""Architectures with units for it."""

GROUPED: Final = 0.95
"""Speed of grouped products, over that of as many rows in one product."""

TILES: Final = ((256, 128, 1.0), (128, 128, 0.92), (64, 128, 0.75))
"""Rows and columns of tiles that libraries choose from, and their speeds over that of the largest."""

DEPTH: Final = 128
"""Columns of a product's inner dimension in the time of which a tile begins and ends."""

NARROW: Final = 0.5
"""Speed of heads without width, over that of heads of 128; it grows with their width."""

KERNEL_S: Final = 4e-6
"""Seconds of a kernel that does next to nothing."""

BETWEEN_S: Final = 2.5e-6
"""Seconds between the end of a kernel and the beginning of the next."""

ONCE_MORE: Final = 1.6
"""Bytes moved by the backward of what is no product, over those of its forward."""

SCORES_BACKWARD: Final = 2.5
"""Operations of attention's backward, which computes scores again, over those of its forward."""

WEIGHTS: Final = 0.93
"""Speed of the products of weights' gradients, which are added in float32, over that of others."""

ACCUMULATED_BYTES: Final = 8
"""Bytes of a weight's gradient, which is added to what there is in float32."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The kernels of one device.

    Attributes:
        peak_flops_per_s: The peak by the data sheet.
        memory_bytes_per_s: The rate of memory that is reached, read or written.
        units: The units, on each of which a tile is computed at a time.
        element_bytes: The bytes of a number that a product reads.
        in_float8: Whether products are computed in float8.
    """

    shares: Shares
    units: int
    peak_flops_per_s: float
    memory_bytes_per_s: float
    element_bytes: int
    in_float8: bool = False

    def seconds(self, kernels: Kernels, phase: Phase, load: Any = 1.0) -> Any:
        """Return the seconds of a task with these forward kernels, in one of its phases.

        Args:
            load: How many times as many rows they have, one number or an array.
        """
        forward, inputs = phase in (Phase.FORWARD, Phase.RECOMPUTE), phase in (Phase.BACKWARD, Phase.INPUT)
        ways = [forward, inputs, phase in (Phase.BACKWARD, Phase.WEIGHT)]
        total: Any = 0.0
        for product in kernels.products:
            size, rows = (product.inner, product.columns, product.groups), product.rows * load
            is_one = isinstance(rows, float | int)
            times_s = [
                sum(self._one_s(n, *size, way) for way, wanted in enumerate(ways) if wanted)
                for n in ([rows] if is_one else rows)
            ]
            total = total + product.number * (times_s[0] if is_one else np.array(times_s))
        if phase is Phase.WEIGHT:
            return total
        shares, width = self.shares, min(1.0, NARROW + (1 - NARROW) * kernels.score_width / 128)
        share, times = (shares.scores, 1.0) if forward else (shares.scores_backward, SCORES_BACKWARD)
        scores_s = times * kernels.score_flops / (share * width * self.peak_flops_per_s) if width else 0.0
        moved = kernels.moved_bytes * (1.0 if forward else ONCE_MORE)
        return total + load * (scores_s + moved / self.memory_bytes_per_s)

    @lru_cache(maxsize=4096)  # noqa: B019  # of few devices, each of which many searches ask
    def _one_s(self, rows: float, inner: float, columns: float, groups: int, way: int) -> float:
        """Return the seconds of a product: 0 forward, 1 of its inputs' gradients, 2 of its weights'."""
        sizes = ((rows, inner, columns), (rows, columns, inner), (inner, rows, columns))[way]
        m, k, n = sizes
        speed = self.shares.products * self.peak_flops_per_s * (GROUPED if groups > 1 else 1.0)
        speed *= (WEIGHTS if way == 2 else 1.0) * (FLOAT8 if self.in_float8 else 1.0)
        flops_s = min(
            math.ceil(groups * math.ceil(m / high) * math.ceil(n / wide) / self.units)
            * (2 * high * wide * (k + DEPTH))
            / (speed * share / self.units)
            for high, wide, share in TILES
        )
        moved = self.element_bytes * (m * k + k * n) + m * n * (
            ACCUMULATED_BYTES if way == 2 else self.element_bytes
        )
        return max(flops_s, groups * moved / self.memory_bytes_per_s, KERNEL_S)
