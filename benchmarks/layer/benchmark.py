"""Everything that `python -m benchmarks.layer` measures, as one result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.layer.compression import CompressionResult, measure_compression
from benchmarks.layer.layers import LayerResult, measure_layers
from benchmarks.layer.orders import OrderResult, measure_orders


@dataclass(frozen=True, kw_only=True)
class LayerBenchmark:
    """The MoE layer in one process: whole, its orders, its compression."""

    layers: LayerResult
    orders: OrderResult
    compression: CompressionResult

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the key `layers` tells it from other results."""
        return {
            "layers": self.layers.to_dict(),
            "orders": self.orders.to_dict(),
            "compression": self.compression.to_dict(),
        }

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> LayerBenchmark:
        """The inverse of `to_dict`. Raises `KeyError` if a key is missing."""
        return LayerBenchmark(
            layers=LayerResult.from_dict(plain["layers"]),
            orders=OrderResult.from_dict(plain["orders"]),
            compression=CompressionResult.from_dict(plain["compression"]),
        )


def measure_layer() -> LayerBenchmark:
    """About two minutes on one core. Raises `ConfigError` if transformers is missing."""
    return LayerBenchmark(layers=measure_layers(), orders=measure_orders(), compression=measure_compression())
