"""Everything that `python -m benchmarks.layer` measures, as one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.layer.compression import CompressionResult, measure_compression
from benchmarks.layer.layers import SIZES, LayerResult, measure_layers
from benchmarks.layer.orders import OrderResult, measure_orders
from benchmarks.progress import in_rows


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
    rows: list[tuple[str, Callable[[], LayerResult | OrderResult | CompressionResult]]] = [
        (
            f"whole layer, {size.experts} experts, {size.tokens} tokens of {size.hidden_size}",
            partial(measure_layers, sizes=[size]),
        )
        for size in SIZES
    ]
    rows += [("orders", measure_orders), ("compression", measure_compression)]
    return _result(in_rows(rows, _result))


def _result(found: Sequence[LayerResult | OrderResult | CompressionResult]) -> LayerBenchmark:
    """Of what there is: the other parts have no cases."""
    layers = [part for part in found if isinstance(part, LayerResult)]
    orders = [part for part in found if isinstance(part, OrderResult)]
    compressions = [part for part in found if isinstance(part, CompressionResult)]
    return LayerBenchmark(
        layers=replace(layers[0], cases=tuple(case for part in layers for case in part.cases)),
        orders=orders[0] if orders else measure_orders(shapes=()),
        compression=compressions[0] if compressions else measure_compression(shapes=()),
    )
